"""What cannot be profiled is refused in one line that says why."""

from __future__ import annotations

import pytest
import torch
from small_models import QUICK, classifier, images, loss
from torch import nn

from backbeat.errors import InputError, MeasurementError, MissingPartError
from backbeat.measure import profile


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda model, batch: model(batch[0]), r"shape \(6, 4\).*mean"),
        (lambda model, batch: 3.0, "returned a float"),
        (lambda model, batch: loss(model, batch).detach(), "needs no gradient"),
        (lambda model, batch: model(batch[0])["loss"], "raised .*Error"),
        (lambda model, batch: torch.zeros((), requires_grad=True), "gave no parameter a gradient"),
    ],
)
def test_a_bad_loss_is_explained(bad, message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile(classifier(), images(), bad, accumulation=2, **QUICK)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="no parameter of the model has requires_grad"):
        profile(classifier().requires_grad_(False), images(), loss, **QUICK)


def test_sparse_gradients_are_refused_with_advice() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"gradient of 0\.weight is sparse.*sparse=False"):
        profile(model, torch.randint(0, 10, (3, 2)), lambda model, batch: model(batch).sum(), **QUICK)


def test_lazy_models_are_refused() -> None:
    with pytest.raises(InputError, match="lazy"):
        profile(nn.Sequential(nn.LazyLinear(4)), images(), loss, **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "fp8.*fp32, tf32, bf16, fp16"),
        ({"precision": "tf32"}, "tf32 on cpu"),
        ({"iterations": 0}, "iterations is 0"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"device": "tpu"}, "'tpu'"),
        ({"device": "mps"}, "cpu or cuda"),
    ],
)
def test_bad_options_are_explained(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile(classifier(), images(), loss, **{**QUICK, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_missing_is_explained() -> None:
    with pytest.raises(MissingPartError, match="sees no CUDA device"):
        profile(classifier(), images(), loss, device="cuda", **QUICK)


def test_running_out_of_memory_is_explained() -> None:
    def greedy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MeasurementError, match="out of memory with 6 samples"):
        profile(classifier(), images(), greedy, **QUICK)
