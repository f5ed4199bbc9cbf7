"""A model's family is found without the files of the others."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slime.backends.megatron_utils import models
from slime.backends.megatron_utils.models import all_families, families_that_say, family_of, family_of_spec
from slime.utils.errors import ConfigError


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The modules that the registry imports, from now on."""
    names: list[str] = []

    def note(name: str) -> ModuleType:
        names.append(name)
        return import_module(name)

    monkeypatch.setattr(models, "import_module", note)
    families_that_say.cache_clear()
    yield names
    families_that_say.cache_clear()


def test_one_file_is_imported_for_a_model_type_a_class_and_a_spec(imported: list[str]) -> None:
    assert models.find_family("Qwen3MoeForCausalLM").model_types == ("qwen3_moe",)
    assert len(imported) == 1
    assert family_of({"model_type": "qwen3_moe"}) is models.find_family("qwen3_moe")
    assert len(set(imported)) == 1
    spec = family_of_spec(["slime_plugins.models.gemma3", "get_gemma3_spec"])
    assert spec is not None and spec.model_types == ("gemma3_text",)
    assert len(set(imported)) == 2


def test_every_family_is_found_by_each_of_its_types_and_by_its_layers(imported: list[str]) -> None:
    for model_type, family in dict(all_families()).items():
        families_that_say.cache_clear()
        imported.clear()
        assert family_of({"model_type": model_type}) is family
        assert models.find_family(model_type.replace("_", "-")) is family
        assert len(set(imported)) <= 2
        if family.spec:
            found = family_of_spec(family.spec.split())
            assert found is not None and found.spec == family.spec


def test_every_published_folder_is_found_by_its_name() -> None:
    published = [(name, config) for family in all_families().values() for name, config in family.published.items()]
    assert all(models.published_config(f"/models/{name}") == config for name, config in published)
    assert not models.published_config("/models/Acme-8B")


def test_a_type_that_no_file_says_imports_nothing(imported: list[str]) -> None:
    assert family_of({"model_type": "acme"}) is None
    assert imported == []


def test_two_files_may_not_declare_one_model_type(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = (name for name in models._texts() if name.endswith(".gpt_oss"))
    twice = ModuleType("twice")
    twice.FAMILIES = import_module(module).FAMILIES  # type: ignore[attr-defined]
    monkeypatch.setattr(models, "import_module", {module: import_module(module), "twice": twice}.__getitem__)
    monkeypatch.setattr(models, "_texts", lambda: {name: '"gptoss"' for name in (module, "twice")})
    with pytest.raises(ConfigError, match="twice declares the model type 'gpt_oss'"):
        family_of({"model_type": "gpt_oss"})


def test_a_family_written_in_single_quotes_is_found(
    imported: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "acme.py"
    path.write_text("\nFAMILIES = (ModelFamily(model_types=('acme_2',)),)\n")
    family = SimpleNamespace(model_types=("acme_2",))
    monkeypatch.setattr(models, "family_files", lambda *patterns: {"acme": path})
    monkeypatch.setattr(models, "_texts", models._texts.__wrapped__)
    monkeypatch.setattr(models, "import_module", {"acme": SimpleNamespace(FAMILIES=(family,))}.__getitem__)
    assert family_of({"model_type": "acme_2"}) is family


def test_a_folder_imports_its_layers_for_names_of_spec_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = import_module("slime_plugins.models.glm4")

    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("slime_plugins.models.import_module", missing)
    assert not hasattr(folder, "pytest_plugins")
    with pytest.raises(ModuleNotFoundError, match="slime_plugins.models.glm4.layers"):
        _ = folder.get_glm_spec
