"""verl's main_ppo with Ray on the CPU, from its launch command to its last step.

    python -m benchmarks.trainers.verl_run [FORM...] [MODE...]

Runs it with the variables and overrides below in mode "off", and in mode "auto" or those that are
given; prints what it says of two steps: two updates of two prompts with four rollouts each, on two
workers. A form is one of `FORMS`, in the place of data parallelism or beside it. What stands in for
GPUs is `STAND_INS`; verl itself and its configuration are the registry's.
"""

from __future__ import annotations

import configparser
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.trainers import on_ray, recorded
from benchmarks.trainers.on_ray import StandIn

ROOT = Path(__file__).parents[2]
UNUSED = (
    "fastapi", "opentelemetry", "prometheus_client", "pylatexenc", "starlette", "uvicorn", "wandb",
)  # fmt: skip
STAND_INS = (
    StandIn("vLLM or SGLang", "an engine in verl's registries that answers with rollouts of the"
            " bundled file and the log-probs that transformers gives; it is given new weights and"
            " leaves them", "they need a GPU"),
    StandIn("packages that it imports: " + ", ".join(UNUSED), "empty modules",
            "web services are not used in such a run"),
    StandIn("the platform", "one for the CPU, by verl's `set_platform` and `VERL_ENGINE_DEVICE`",
            "its platforms are GPUs and NPUs"),
    StandIn("`torch.cuda`, NCCL", "`megatron_prefix/lab/platforms/cpu.py`, gloo",
            "there is no GPU"),
    StandIn("transformer-engine", "Megatron's local layers, with `LocalAttention` and torch's norm",
            "its kernels need a GPU; Megatron's own attention takes no packs, and its norm no"
            " sequence parallelism"),
    StandIn("Megatron-Bridge", "mbridge, by verl's option `vanilla_mbridge`, given"
            " transformer-engine's names of two norms", "it needs transformer-engine; mbridge does"
            " not know the names in local layers"),
    StandIn("bf16", "fp32, by verl's `PrecisionType`", "figures of two modes say more in fp32,"
            " which its configuration does not take"),
    StandIn("Triton, `torch.compile`", "functions as written", "they need a GPU, or a compiler"),
    StandIn("two GPUs", "`ray_kwargs.ray_init.num_gpus=2`", "Ray only counts them"),
)  # fmt: skip
"""All of it; verl_on_cpu.py and verl_engine.py do it."""

MODULES = "benchmarks.trainers.verl_on_cpu,megatron_prefix.auto.whole_groups"
OVERRIDES = f"""
    data.train_batch_size=4 data.max_prompt_length=512 data.max_response_length=256
    data.shuffle=False data.dataloader_num_workers=0
    transfer_queue.backend.SimpleStorage.num_data_storage_units=2
    algorithm.adv_estimator=grpo reward.num_workers=1 reward.custom_reward_function.name=score
    actor_rollout_ref.rollout.name=recorded actor_rollout_ref.rollout.n={recorded.SIZE}
    actor_rollout_ref.rollout.tensor_model_parallel_size={on_ray.WORKERS}
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048
    actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.megatron.vanilla_mbridge=True
    actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=local
    +actor_rollout_ref.actor.megatron.override_transformer_config.masked_softmax_fusion=False
    trainer.n_gpus_per_node={on_ray.WORKERS} trainer.nnodes=1 trainer.total_epochs=2
    trainer.total_training_steps=2 trainer.val_before_train=False trainer.test_freq=-1
    trainer.save_freq=-1 trainer.logger=[console]
    ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus={on_ray.WORKERS}
    +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init._node_ip_address=127.0.0.1
    +ray_kwargs.ray_init.object_store_memory=200000000"""
"""Groups stay on one rank, as the page says."""
MEGATRON = "actor_rollout_ref.actor.megatron."
FORMS = {
    "tp2": f"{MEGATRON}tensor_model_parallel_size=2",
    "pp2": f"{MEGATRON}pipeline_model_parallel_size=2",
    "critic": """
        algorithm.adv_estimator=gae critic.enable=True critic.optim.lr=1e-4
        critic.ppo_max_token_len_per_gpu=2048 critic.megatron.vanilla_mbridge=True
        critic.megatron.override_transformer_config.attention_backend=local
        +critic.megatron.override_transformer_config.masked_softmax_fusion=False""",
}
"""Ranks of the actor (and of the critic, which has its own in the same processes); PPO's critic."""
FIGURES = ("actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm",
           "training/rollout_actor_probs_pearson_corr", "critic/rewards/mean",
           "critic/vf_loss", "critic/vpred_mean", "critic/grad_norm")  # fmt: skip


def write_plugin(folder: Path) -> None:
    """Puts what pip leaves of this package there, as far as entry points tell."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    (info := folder / "megatron_prefix-0.dist-info").mkdir()
    (info / "METADATA").write_text("Name: megatron_prefix\nVersion: 0\n", encoding="utf-8")
    text = "[verl.plugins]" + setup["options.entry_points"]["verl.plugins"]
    (info / "entry_points.txt").write_text(text, encoding="utf-8")


def write_data(folder: Path) -> dict[str, Path]:
    """The model, the prompts for verl's data set, and the answers; by the variables' names."""
    import pandas

    model = folder / "model"
    recorded.write_model(model)
    rows, answers = [], {}
    for number, group in enumerate(recorded.groups(4)):
        first = group.rollouts[0]
        prompt = first.tokens[: first.prompt_len].tolist()
        said = recorded.log_probs(model, group.rollouts)
        answers[" ".join(map(str, prompt))] = [
            (one.tokens[one.prompt_len :].tolist(), log_probs)
            for one, log_probs in zip(group.rollouts, said, strict=True)
        ]
        words = " ".join(recorded.word(token) for token in prompt)
        rows.append({
            "data_source": "recorded", "prompt": [{"role": "user", "content": words}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        })  # fmt: skip
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    return {"model": model, "data": folder / "prompts.parquet"}


def figures(said: str) -> list[dict[str, float]]:
    """The numbers of verl's lines "step:1 - name:value - ..."."""
    return [
        {name: float(value) for name, value in re.findall(r"(\S+):(\S+?)(?: -|$)", line)
         if name in FIGURES}
        for line in re.findall(r"\bstep:\d+ - .*", said)
    ]  # fmt: skip


def overrides(forms: Sequence[str]) -> list[str]:
    """verl's command line, for some of `FORMS`."""
    found = [*OVERRIDES.split(), *(one for form in forms for one in FORMS[form].split())]
    if "critic" in forms:
        ranks = [one for one in found if one.startswith(MEGATRON) and "model_parallel_size" in one]
        found += [one.replace(MEGATRON, "critic.megatron.") for one in ranks]
    return found


def main() -> int:
    """Runs all modes."""
    from megatron_prefix.lab.numerics import tolerance
    from tests.core.trainers.registry import installed

    folders = [installed("verl_run"), installed("verl")]
    sys.path.extend(map(str, folders))
    forms = [word for word in sys.argv[1:] if word in FORMS]
    modes = [word for word in sys.argv[1:] if word not in FORMS] or ["auto"]
    runs = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plugin(folder)
        written = write_data(folder)
        command = [
            "-m", "verl.trainer.main_ppo", "--config-name", "ppo_megatron_trainer",
            *overrides(forms), f"data.train_files={written['data']}",
            f"data.val_files={written['data']}", f"actor_rollout_ref.model.path={written['model']}",
            f"reward.custom_reward_function.path={Path(__file__).with_name('verl_engine.py')}",
            f"trainer.default_local_dir={folder / 'checkpoints'}", f"hydra.run.dir={folder}",
            *([f"critic.model.path={written['model']}"] if "critic" in forms else ()),
        ]  # fmt: skip
        for mode in ("off", *modes):
            environ = {
                "MEGATRON_PREFIX_MODE": mode, "VERL_USE_EXTERNAL_MODULES": MODULES,
                "RECORDED_ANSWERS": str(folder / "answers.json"), "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            said = on_ray.launched(command, [folder, *folders], environ)
            print(*dict.fromkeys(on_ray.TOLD.findall(said)), sep="\n", flush=True)
            runs[mode] = figures(said)
    return on_ray.compared(runs, tolerance(torch.float32, 4096))


if __name__ == "__main__":
    sys.exit(main())
