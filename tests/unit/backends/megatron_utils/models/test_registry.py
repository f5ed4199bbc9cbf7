"""A model's family is found by its type, its class, and its layers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slime.backends.megatron_utils import models
from slime.backends.megatron_utils.models import all_families, family_of, family_of_spec
from slime.utils.errors import ConfigError


def test_a_family_is_found_by_a_class_of_transformers() -> None:
    assert models.find_family("Qwen3MoeForCausalLM").model_types == ("qwen3_moe",)
    assert family_of({"model_type": "qwen3_moe"}) is models.find_family("qwen3_moe")
    spec = family_of_spec(["slime_plugins.models.gemma3", "get_gemma3_spec"])
    assert spec is not None and spec.model_types == ("gemma3_text",)


def test_every_family_is_found_by_each_of_its_types_and_by_its_layers() -> None:
    for model_type, family in all_families().items():
        assert family_of({"model_type": model_type}) is family
        assert models.find_family(model_type.replace("_", "-")) is family
        if family.spec:
            found = family_of_spec(family.spec.split())
            assert found is not None and found.spec == family.spec


def test_every_published_folder_is_found_by_its_name() -> None:
    published = [(name, config) for family in all_families().values() for name, config in family.published.items()]
    assert all(models.published_config(f"/models/{name}") == config for name, config in published)
    assert not models.published_config("/models/Acme-8B")


def test_a_type_that_no_file_declares_has_no_family() -> None:
    assert family_of({"model_type": "acme"}) is None
    assert family_of_spec(["acme.layers", "get_spec"]) is None
    with pytest.raises(ConfigError, match="'acme'; weights can be converted for .*qwen3"):
        models.find_family("acme")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, tuple[str, ...]]]:
    """Model types by file, in a registry with only these files and one file without families."""
    declared: dict[str, tuple[str, ...]] = {}
    (tmp_path / "declares.py").write_text("\nFAMILIES = ()\n")
    (tmp_path / "shares.py").write_text("RULES = ()\n")

    def files(*patterns: str) -> dict[str, Path]:
        return {"shares": tmp_path / "shares.py", **dict.fromkeys(declared, tmp_path / "declares.py")}

    def module(name: str) -> SimpleNamespace:
        if not declared[name]:
            raise ImportError("cannot import name 'RULES'")
        family = SimpleNamespace(model_types=declared[name], weight_map=SimpleNamespace(family=f"of {name}"))
        return SimpleNamespace(FAMILIES=(family,))

    monkeypatch.setattr(models, "family_files", files)
    monkeypatch.setattr(models, "import_module", module)
    models._import_families.cache_clear()
    yield declared
    models._import_families.cache_clear()
    models.find_family.cache_clear()


def test_a_file_that_declares_no_family_is_not_imported(registry: dict[str, tuple[str, ...]]) -> None:
    registry["one"] = ("acme", "acme_2")
    assert set(all_families()) == {"acme", "acme_2"}


def test_two_files_may_not_declare_one_model_type(registry: dict[str, tuple[str, ...]]) -> None:
    registry.update(one=("acme",), two=("acme",))
    with pytest.raises(ConfigError, match="two declares the model type 'acme', and so does the family of one"):
        all_families()


def test_a_file_that_cannot_be_imported_is_named_where_its_type_may_be_wanted(
    registry: dict[str, tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    registry.update(broken=(), one=("acme",))
    assert set(all_families()) == {"acme"}
    assert "The model family broken cannot be used: cannot import name 'RULES'" in caplog.text
    with pytest.raises(
        ConfigError, match=r"could not be imported: broken \(ImportError: cannot import name 'RULES'\)"
    ):
        models.find_family("other")


def test_a_folder_imports_its_layers_for_names_of_spec_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = import_module("slime_plugins.models.glm4")

    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("slime_plugins.models.import_module", missing)
    assert not hasattr(folder, "pytest_plugins")
    with pytest.raises(ModuleNotFoundError, match="slime_plugins.models.glm4.layers"):
        _ = folder.get_glm_spec
