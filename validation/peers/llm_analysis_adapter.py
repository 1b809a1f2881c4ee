"""llm-analysis: latency of a micro-batch through all stages, as many times as there are micro-batches, and an update.

Pipelines have no bubble in it and data parallelism no reduction. Products reach half of the peak, which is what its
constants name for training; its default is all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name
from llm_analysis.logger import logger

from validation.ask import Answer, CannotAsk
from validation.case import Case
from validation.peers import unasked

GPUS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
RECOMPUTED = {"none": "NONE", "selective": "ATTN_COMPUTE", "full": "FULL"}


def ask(case: Case, shape: Mapping[str, Any]) -> Answer:
    why = unasked(case, shape, GPUS)
    if why is not None:
        raise CannotAsk(why)
    logger.setLevel(logging.ERROR)
    gpu = get_gpu_config_by_name(GPUS[case.accelerator])
    model = ModelConfig(
        name=shape["name"], num_layers=shape["layers"], n_head=shape["heads"], hidden_dim=shape["hidden"],
        vocab_size=shape["vocab"], max_seq_len=case.sequence, num_key_value_heads=shape.get("kv_heads") or None,
        ffn_embed_dim=shape["ffn"], mlp_gated_linear_units=shape.get("gated", True),
    )  # fmt: skip
    try:
        found = LLMAnalysis(
            model, gpu, parallelism_config=ParallelismConfig(tp_size=case.tp, pp_size=case.pp, dp_size=case.dp),
            flops_efficiency=0.5, hbm_memory_efficiency=1.0,
        ).training(
            batch_size_per_gpu=case.micro_batch,
            gradient_accumulation_steps=case.global_batch // (case.dp * case.micro_batch),
            global_batch_size=case.global_batch,
            seq_len=case.sequence,
            activation_recomputation=ActivationRecomputation[RECOMPUTED[case.recompute]],
            ds_zero=DSZeRO(case.zero),
            flash_attn=case.framework not in ("megatron-2021", "megatron-deepspeed"),
        )  # fmt: skip
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        raise CannotAsk(f"it refuses: {error}") from None
    memory = found["estimated_peak_memory_per_gpu"]
    return Answer(seconds=found["latency_per_iter"], memory_bytes=memory, fits=memory <= gpu.mem_per_GPU_in_GB * 2**30)
