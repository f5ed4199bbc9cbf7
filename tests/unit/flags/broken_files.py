"""Mistakes in files: checkpoints, data, and YAML files named by flags."""

from __future__ import annotations

import json

from slime.utils.errors import DataError
from tests.unit.flags.broken_configurations import Broken
from tests.unit.scripts.test_model_files import PUBLISHED
from tests.unit.utils.family_templates import FAMILIES, tokenizer_of

SFT = (
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only "
    "--n-samples-per-prompt 1 --global-batch-size 32 --disable-compute-advantages-and-returns"
)
CONVERSATION = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "1+1"}}]}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
"""The pointer that replaces a large file that was cloned but not fetched."""
PREFILL_AND_DECODE = """
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: %d, num_gpus_per_engine: 2, overrides: {%s}}
"""

CHECKPOINTS = (
    Broken(
        mistake="no model",
        without=("--hf-checkpoint",),
        says=("--hf-checkpoint is not given",),
    ),
    Broken(
        mistake="a Megatron checkpoint in the place of the model",
        flags="--hf-checkpoint $folder/dist",
        files={"dist/latest_checkpointed_iteration.txt": "release", "dist/release/metadata.json": "{}"},
        says=("--hf-checkpoint", "config.json", "--ref-load"),
    ),
    Broken(
        mistake="weights that were cloned and not fetched",
        files={"model/model.safetensors": LFS},
        says=("--hf-checkpoint", "model.safetensors", "git lfs pull"),
    ),
    Broken(
        mistake="a shell variable that is not set",
        flags="--hf-checkpoint ''",
        says=("--hf-checkpoint", "is empty; is a shell variable unset?"),
    ),
    Broken(
        mistake="an adapter in the place of the model",
        files={"model/config.json": None, "model/adapter_config.json": "{}"},
        says=("--hf-checkpoint", "adapter_config.json", "merge it into its base model"),
    ),
    Broken(
        mistake="a file as the folder to go on from",
        flags="--load $folder/prompts.jsonl",
        says=("--load", "prompts.jsonl is a file", "give the folder"),
    ),
    Broken(
        mistake="a reference of another size",
        flags="--ref-load $folder/other",
        files={
            "other/config.json": json.dumps(PUBLISHED["qwen3-0.6B"]),
            "other/model.safetensors": "",
        },
        says=("--ref-load", "other is another model", "--hidden-size is 2560; hidden_size is 1024", "--hf-checkpoint"),
    ),
    Broken(
        mistake="a download that stopped half-way",
        files={
            "model/model.safetensors": None,
            "model/model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors"}}',
        },
        says=("--hf-checkpoint", "lacks 1 weight files", "model-1.safetensors", "download the model again"),
    ),
    Broken(
        mistake="no tokenizer",
        files={"model/tokenizer.json": None},
        says=("--hf-checkpoint", "has no tokenizer"),
    ),
    Broken(
        mistake="a base model without a chat template",
        files={"model/tokenizer_config.json": "{}"},
        flags="--apply-chat-template",
        says=("--apply-chat-template", "chat template", "--hf-checkpoint"),
    ),
    Broken(
        mistake="no reference for the KL",
        without=("--ref-load",),
        flags="--load $model --use-kl-loss",
        says=("--use-kl-loss needs a reference model", "--ref-load"),
    ),
    Broken(
        mistake="a reference that was never converted",
        flags="--ref-load $folder/qwen_torch_dist",
        says=("--ref-load", "qwen_torch_dist is not a folder"),
    ),
    Broken(
        mistake="a folder without a checkpoint",
        flags="--load $folder/empty --ref-load $folder/empty",
        files={"empty/readme.txt": ""},
        says=("--ref-load", "holds neither a Megatron checkpoint", "nor a Hugging Face model"),
    ),
    Broken(
        mistake="a save that is gone",
        flags="--load $folder/out",
        files={"out/latest_checkpointed_iteration.txt": "40", "out/iter_0000020/x": ""},
        says=("--load", "no checkpoint iter_0000040", "iter_0000020"),
    ),
    Broken(
        mistake="the folder of a save that is not whole",
        flags="--load $folder/iter_0000020",
        files={"iter_0000020/x": ""},
        says=("--load", "iter_0000020 is an incomplete checkpoint, without metadata.json"),
        error=DataError,
    ),
    Broken(
        mistake="a run that has ended already",
        flags="--load $folder/out",
        files={"out/latest_checkpointed_iteration.txt": "99", "out/iter_0000099/metadata.json": ""},
        says=("--num-rollout 100", "rollout 99", "nothing is left"),
        error=None,
    ),
    Broken(
        mistake="quantized weights as the trainer's start, in a format that it cannot read",
        flags="--ref-load $folder/awq",
        files={
            "awq/config.json": '{"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}',
            "awq/model.safetensors": "",
        },
        says=("--ref-load", "awq", "bf16"),
    ),
    Broken(
        mistake="engines in a quantization that pushes cannot make",
        config={"quantization_config": {"quant_method": "awq"}},
        without=("--ref-load",),
        flags="--load $folder/out",
        says=("quantized (awq)", "--hf-checkpoint"),
    ),
    Broken(
        mistake="engines in the MXFP4 of gpt-oss",
        script="gpt-oss-20b",
        config={"quantization_config": {"quant_method": "mxfp4"}},
        says=("--hf-checkpoint is MXFP4", "--ref-load", "tools/convert_mxfp4_to_bf16.py"),
    ),
    Broken(
        mistake="experts of gpt-oss, replayed from engines that do not say them",
        script="gpt-oss-20b",
        flags="--use-rollout-routing-replay",
        says=("--use-rollout-routing-replay", "gpt_oss", "use --use-routing-replay"),
    ),
)

DATA = (
    Broken(
        mistake="no prompts",
        without=("--prompt-data",),
        says=("--prompt-data is not given", "--disable-rollout-global-dataset"),
    ),
    Broken(
        mistake="prompts that are not there",
        flags="--prompt-data $folder/dapo.jsonl",
        says=("--prompt-data", "dapo.jsonl"),
        error=DataError,
    ),
    Broken(
        mistake="prompts in another format",
        flags="--prompt-data $folder/prompts.json",
        files={"prompts.json": "[]"},
        says=("--prompt-data", "prompts.json", ".jsonl", ".parquet"),
        error=DataError,
    ),
    Broken(
        mistake="another name of the prompt's column",
        flags="--input-key prompt",
        says=("line 1 has no key 'prompt'", "--input-key", "input, label"),
        error=DataError,
    ),
    Broken(
        mistake="another name of the label's column",
        flags="--label-key answer",
        says=("line 1 has no key 'answer'", "--label-key", "input, label"),
        error=DataError,
    ),
    Broken(
        mistake="messages for a base model",
        files={
            "prompts.jsonl": '{"input": [{"role": "user", "content": "1+1="}], "label": "2"}\n',
            "model/tokenizer_config.json": "{}",
        },
        says=("--apply-chat-template", "has no chat template", "name a column of text"),
    ),
    Broken(
        mistake="a grader of answers without the answers' column",
        without=("--label-key",),
        says=("--rm-type math", "--label-key is not given", "line 1 has input, label"),
    ),
    Broken(
        mistake="a column of labels without labels",
        files={"prompts.jsonl": '{"input": "1+1=", "label": null}\n'},
        says=("prompts.jsonl line 1", "--label-key", "null", "--rm-type math"),
        error=DataError,
    ),
    Broken(
        mistake="a column of metadata that no row has",
        flags="--metadata-key extra",
        says=("No row of", "'extra', which --metadata-key names", "input, label"),
        error=DataError,
    ),
    Broken(
        mistake="a column of tools that no row has",
        flags="--tool-key functions --apply-chat-template",
        says=("No row of", "'functions', which --tool-key names"),
        error=DataError,
    ),
    Broken(
        mistake="a loss mask of another family's template",
        flags=f"{SFT} --loss-mask-type qwen",
        files={
            "model/tokenizer.json": tokenizer_of("gemma3").backend_tokenizer.to_str(),
            "model/tokenizer_config.json": json.dumps(
                {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": FAMILIES["gemma3"].template}
            ),
            "prompts.jsonl": json.dumps({"input": CONVERSATION, "label": "2"}),
        },
        says=("prompts.jsonl line 1", "must alternate", "--loss-mask-type any fits the template of every family"),
        error=DataError,
    ),
    Broken(
        mistake="arguments of a call that are no object",
        files={"prompts.jsonl": json.dumps({"input": [*CONVERSATION, CALL], "label": "2"})},
        flags="--apply-chat-template",
        says=("prompts.jsonl line 1: message 2 of the prompt: the arguments of a call are the text '1+1'",),
        error=DataError,
    ),
    Broken(
        mistake="a line that is no JSON",
        files={"prompts.jsonl": '{"input": "1", "label": "1"}\n{"input": \'2\'}\n'},
        says=("prompts.jsonl line 2 is not JSON",),
        error=DataError,
    ),
    Broken(
        mistake="an empty file",
        files={"prompts.jsonl": "\n"},
        says=("prompts.jsonl selects no row", "--prompt-data"),
        error=DataError,
    ),
    Broken(
        mistake="a slice behind the end",
        flags="--prompt-data $folder/prompts.jsonl@[1000:2000]",
        says=("prompts.jsonl@[1000:2000] selects no row",),
        error=DataError,
    ),
    Broken(
        mistake="a message without a role",
        files={"prompts.jsonl": '{"input": [{"content": "1+1="}], "label": "2"}\n'},
        says=("line 1", "message 0", "role"),
        error=DataError,
    ),
    Broken(
        mistake="eval prompts that are not there",
        flags="--eval-interval 5 --eval-prompt-data aime $folder/aime.jsonl",
        says=("--eval-prompt-data", "aime.jsonl"),
        error=DataError,
    ),
    Broken(
        mistake="recorded rollouts that are not there",
        flags="--load-debug-rollout-data '$folder/rollouts/{rollout_id}.pt'",
        says=("--load-debug-rollout-data", "no file fits", "--save-debug-rollout-data"),
    ),
)

YAML = (
    Broken(
        mistake="a settings file that is no YAML",
        flags="--custom-config-path $folder/mine.yaml",
        files={"mine.yaml": "lr: [1e-6\n"},
        says=("--custom-config-path", "mine.yaml is not YAML", "line"),
    ),
    Broken(
        mistake="a wrong choice in a settings file",
        flags="--custom-config-path $folder/mine.yaml",
        files={"mine.yaml": "kl_loss_type: k4\n"},
        says=("--custom-config-path", "kl_loss_type is 'k4'", "k3"),
    ),
    Broken(
        mistake="the number of an optimizer that there is not, in a settings file",
        flags="--custom-config-path $folder/mine.yaml",
        files={"mine.yaml": "muon_momentum: 0.9\n"},
        says=("--custom-config-path", "has the key muon_momentum", "the optimizer is Adam"),
    ),
    Broken(
        mistake="a misspelt key in a settings file",
        flags="--custom-config-path $folder/mine.yaml",
        files={"mine.yaml": "rollout_batchsize: 64\n"},
        says=("--custom-config-path", "rollout_batchsize", "rollout_batch_size"),
        error=None,
    ),
    Broken(
        mistake="an unknown role",
        flags="--megatron-config-path $folder/roles.yaml",
        files={"roles.yaml": "megatron: [{name: a, role: actr, overrides: {lr: 1e-6}}]\n"},
        says=("--megatron-config-path", "the role 'actr'", "actor or critic"),
    ),
    Broken(
        mistake="a misspelt override of a role",
        flags="--megatron-config-path $folder/roles.yaml",
        files={"roles.yaml": "megatron: [{name: a, role: actor, overrides: {tensor_model_parallel: 2}}]\n"},
        says=("--megatron-config-path", "tensor_model_parallel", "Did you mean tensor_model_parallel_size?"),
    ),
    Broken(
        mistake="groups of engines that do not sum up",
        flags="--sglang-config $folder/engines.yaml",
        files={"engines.yaml": PREFILL_AND_DECODE % (4, "")},
        says=("engines.yaml take 6 GPUs", "--rollout-num-gpus is 8", "must be equal"),
    ),
    Broken(
        mistake="a group of engines that does not divide",
        flags="--sglang-config $folder/engines.yaml",
        files={"engines.yaml": PREFILL_AND_DECODE % (5, "")},
        says=("engines.yaml", "5 GPUs do not divide into engines of 2", "num_gpus_per_engine"),
    ),
    Broken(
        mistake="a second model whose folder is not there",
        flags="--sglang-config $folder/engines.yaml",
        files={
            "engines.yaml": PREFILL_AND_DECODE % (4, "")
            + "  - {name: judge, model_path: /no/judge, server_groups: [{worker_type: regular, num_gpus: 2}]}\n"
        },
        says=("engines.yaml: model_path of judge: /no/judge is not a folder", "hf download"),
    ),
    Broken(
        mistake="a misspelt key of a group",
        flags="--sglang-config $folder/engines.yaml",
        files={"engines.yaml": "sglang: [{name: a, server_groups: [{worker: regular, num_gpus: 8}]}]\n"},
        says=("engines.yaml", "unknown key worker", "worker_type"),
    ),
    Broken(
        mistake="a misspelt override of a group",
        flags="--sglang-config $folder/engines.yaml",
        files={"engines.yaml": PREFILL_AND_DECODE % (6, "cuda_graph_max_batch: 12")},
        says=("engines.yaml", "cuda_graph_max_batch", "cuda_graph_max_bs"),
    ),
    Broken(
        mistake="a misspelt field of eval data",
        flags="--eval-interval 5 --eval-config $folder/eval.yaml",
        files={"eval.yaml": "datasets: [{name: a, path: prompts.jsonl, max_responselen: 9}]\n"},
        says=("--eval-config", "max_responselen", "max_response_len"),
    ),
    Broken(
        mistake="eval data with one name twice",
        flags="--eval-interval 5 --eval-config $folder/eval.yaml",
        files={"eval.yaml": "datasets: [{name: a, path: p.jsonl}, {name: a, path: q.jsonl}]\n"},
        says=("a, a", "may be used once"),
    ),
)

BROKEN = (*CHECKPOINTS, *DATA, *YAML)
