"""Calculon: a GPT by its blocks, on the systems that stand beside its package.

Embeddings and the head are not in it. A gated MLP is one of 1.5 times the width, since it has three matrices of two.
Tensor parallelism lies inside a node; pipeline and data parallelism use the network where they leave it. Memory is made
large enough, so that every layout has a time, and the fit is told apart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import calculon
from calculon.llm import Llm
from calculon.system import System

from validation.ask import Answer, CannotAsk
from validation.case import Case
from validation.peers import unasked

SYSTEMS = {"a100": "a100_80g", "h100": "h100_80g_nvl8"}
PER_NODE = 8


def ask(case: Case, shape: Mapping[str, Any]) -> Answer:
    why = unasked(case, shape, SYSTEMS)
    if why is not None:
        raise CannotAsk(why)
    path = Path(calculon.__file__).parents[1] / "systems" / f"{SYSTEMS[case.accelerator]}.json"
    system = json.loads(path.read_text())
    gib, system["mem1"]["GiB"] = system["mem1"]["GiB"], 10**6
    for network in system["networks"]:
        network["must_be_filled"] = False
    hidden, heads = shape["hidden"], shape["heads"]
    application = {
        "hidden": hidden,
        "feedforward": round(shape["ffn"] * (1.5 if shape.get("gated", True) else 1)),
        "seq_size": case.sequence,
        "attn_heads": heads,
        "attn_size": hidden // heads,
        "num_blocks": shape["layers"],
    }
    execution = {
        "num_procs": case.gpus,
        "tensor_par": case.tp,
        "pipeline_par": case.pp,
        "data_par": case.dp,
        "tensor_par_net": int(case.tp > PER_NODE),
        "pipeline_par_net": int(case.gpus > PER_NODE),
        "data_par_net": int(case.tp * case.dp > PER_NODE),
        "batch_size": case.global_batch,
        "microbatch_size": case.micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": {"selective": "attn_only"}.get(case.recompute, case.recompute),
        "pipeline_interleaving": case.chunks,
        "optimizer_sharding": case.zero > 0 and case.dp > 1,
        "tensor_par_comm_type": "rs_ag" if case.sequence_parallel and case.tp > 1 else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": case.zero > 0 and case.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    try:
        there = System(system)
        model = Llm(Llm.Application(application), logging.getLogger("calculon"))
        model.compile(there, Llm.Execution.from_json(execution))
        model.run(there)
    except (Llm.Error, AssertionError) as error:
        raise CannotAsk(f"it refuses: {error}") from None
    memory = model.get_mem_tier1_cap_req()
    return Answer(seconds=model.get_total_time(), memory_bytes=memory, fits=memory <= gib * 2**30)
