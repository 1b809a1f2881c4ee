"""SimuMax: operators and collectives as they were measured on the systems that stand beside its package.

Of these, B200 alone is among the accelerators here; A100 is on PCIe. Its latent attention and experts are asked, too.
Settings are those of its own benchmark: fused cross-entropy, nothing overlapped, sends between stages waited for.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import simumax
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM

from validation.ask import Answer, CannotAsk
from validation.case import Case
from validation.peers import unasked

SYSTEMS = {"b200": "b200_bf16_ceperm"}
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
MEMORY_BYTES = 180 * 10**9
RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {"enable_recompute": False},
    "selective": {"enable_recompute": True, "recompute_granularity": "sdp_only"},
    "full": {"enable_recompute": True, "recompute_granularity": "full_block"},
}


def ask(case: Case, shape: Mapping[str, Any]) -> Answer:
    why = unasked(case, shape, SYSTEMS, everything=True)
    if why is not None:
        raise CannotAsk(why)
    configs = Path(simumax.__file__).parents[1] / "configs" / "system"
    peer = PerfLLM()
    try:
        # It prints what it does, and warns of recomputation.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer.configure(
                strategy_config=_strategy(case, shape), model_config=_model(shape),
                system_config=SystemConfig.init_from_config_file(str(configs / f"{SYSTEMS[case.accelerator]}.json")),
            )  # fmt: skip
            peer.run_estimate()
            memory, cost = peer.analysis_mem().data, peer.analysis_cost().data
    except (AssertionError, ValueError, KeyError, ZeroDivisionError) as error:
        raise CannotAsk(f"it refuses: {error}") from None
    stages = [memory] if "peak_mem" in memory else list(memory.values())
    peak = max(_bytes(one["peak_mem"]) for one in stages)
    tokens = case.global_batch * case.sequence / case.gpus
    seconds = tokens / cost["throughput_per_accelerator"]
    return Answer(seconds=seconds, memory_bytes=peak, fits=peak <= MEMORY_BYTES)


def _model(shape: Mapping[str, Any]) -> ModelConfig:
    heads, width = shape["heads"], shape.get("head_width") or shape["hidden"] // shape["heads"]
    told = {
        "hidden_size": shape["hidden"], "head_num": heads, "kv_head_num": shape.get("kv_heads") or heads,
        "head_size": width, "intermediate_size": shape["ffn"], "layer_num": shape["layers"],
        "vocab_size": shape["vocab"], "use_swiglu": shape.get("gated", True),
    }  # fmt: skip
    if shape.get("experts"):
        told |= {
            "expert_num": shape["experts"], "topk": shape["experts_per_token"],
            "moe_ffn_hidden_size": shape["expert_ffn"], "dense_layers": shape.get("dense_layers", 0),
            "moe_shared_expert_intermediate_size": shape.get("shared_ffn") or None,
        }  # fmt: skip
    if shape.get("latent_width"):
        told |= {
            "attention_type": "mla", "v_head_dim": shape["value_width"], "qk_head_dim": width,
            "qk_pos_emb_head_dim": shape["rope_width"], "q_lora_rank": shape["query_rank"],
            "kv_lora_rank": shape["latent_width"],
        }  # fmt: skip
    return ModelConfig(**told)


def _strategy(case: Case, shape: Mapping[str, Any]) -> StrategyConfig:
    layers = shape["layers"] if case.recompute != "none" else 0
    return StrategyConfig(
        seq_len=case.sequence, micro_batch_size=case.micro_batch, dtype="bf16", world_size=case.gpus,
        micro_batch_num=case.global_batch // (case.dp * case.micro_batch), tp_size=case.tp, cp_size=case.cp,
        pp_size=case.pp, ep_size=case.ep, interleaving_size=case.chunks, zero_state=int(case.zero > 0),
        enable_sequence_parallel=case.sequence_parallel and case.tp > 1, recompute_layer_num=layers,
        cross_entropy_loss_fusion=True, pp_comm_async=False, overlap_grad_reduce=False, te_version="2.11.0",
        **RECOMPUTED[case.recompute],
    )  # fmt: skip


def _bytes(text: str) -> float:
    value, unit = text.split()
    return float(value) * UNITS[unit]
