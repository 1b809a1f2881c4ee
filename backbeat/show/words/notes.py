"""What a prediction notes, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backbeat.model.prediction import Note
from backbeat.units import counted, format_bytes, format_seconds


def worded(notes: Iterable[Note]) -> list[str]:
    """Each note once, in order.

    >>> worded([Note("made_for", {"made_for": 8, "workers": 64})] * 2)
    ['the plan was made for 8 workers, this is 64']
    """
    return list(dict.fromkeys(note_text(note) for note in notes))


def note_text(note: Note) -> str:
    """One note as a sentence without a full stop."""
    return _SENTENCES[note.kind].format(**{name: _shown(name, value) for name, value in note.values.items()})


def _shown(name: str, value: Any) -> Any:
    """A value as its name's ending says: seconds, bytes, a number of things."""
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.startswith("counted_"):
        return counted(value, name.removeprefix("counted_").replace("_", " "))
    return value


_AGAIN = "profile again to measure it"
_PACED = "a step takes {paced_s} that would take {device_s} if the device never waited for work"
_SENTENCES: dict[str, str] = {
    "beside": "computation beside communication takes longer, {origin}",
    "operators": "compute: {origin}",
    "executed": "run in the lab; computation is spun",
    "closed_form": "the pipeline has too many operations to be simulated: its time is the closed form's",
    "text": "{text}",
    "network": "network {network}: {text}",
    "joined": "network {network}: {text}",
    "pieces": "{text}",
    "batch": "{text}",
    "analytic": "the profile {profile} is computed from shapes and peak rates, not measured",
    "compression_assumed": f"the profile has no compression cost: taken as {{ns_per_byte:g}} ns a byte; {_AGAIN}",
    "compression_scaled": (
        "what compressing costs is scaled from an H200 by the bandwidth of memory: {ns_per_byte:.3g} ns a byte; "
        f"{_AGAIN}"
    ),
    "moved": (
        "the profile {profile} was measured on {measured}: its times are moved to {device} by what operators take on "
        "either, its memory is as measured"
    ),
    "data_sheet": (
        "of {device} only data sheets are known: operators follow those measured on the GPUs it resembles ({like})"
    ),
    "compression_launches": (
        f"the profile does not say what a compressed bucket costs by itself, in launches: taken as nothing; {_AGAIN}"
    ),
    "compressed_gather": "the all-gather of compressed buckets is derived from the all-reduce, not measured",
    "compressed_communicators": "compressed plans are predicted on one communicator; this one has {communicators}",
    "precision_unknown": "precision {precision!r} is not known, and taken for training without autocast",
    "halves": "{collectives} times are taken as half of the all-reduce's: `backbeat calibrate` measures them",
    "made_for": "the plan was made for {made_for} workers, this is {workers}",
    "few_iterations": (
        "no wait for the slowest worker is predicted: {counted_iteration_time} say too little, {needed} are needed"
    ),
    "left_out": (
        "{gradients} gradients are not in the plan and are taken to travel in one bucket after it, from {first}"
    ),
    "extrapolated": "{collective} times at {workers} workers are extrapolated from {measured}{how}",
    "interpolated": "{collective} times at {workers} workers lie between those at {below} and {above}",
    "large": "{what} above {largest_bytes} lie beyond the largest message measured",
    "units_unlike": (
        "the profile's iteration_s has a mean of {usual_s}, forward, backward and update take {alone_s}: are both in "
        "seconds? The wait for the slowest worker is taken from the former"
    ),
    "slowest_extrapolated": "the slowest of {workers} workers is extrapolated from {iterations} iteration times",
    "host_paces": f"the host sets the pace: {_PACED}",
    "host_late": f"the host issues a backward after the last step's communication has ended: {_PACED}",
    "host_unknown": (
        "the host sets this model's pace, and the profile does not say what recomputing costs it: it computes longer "
        f"than predicted (BERT-Large on one H200 1.7 to 1.9 times); {_AGAIN}"
    ),
    "not_kept": "what is not kept of activations costs {not_kept_s} of each step; scaling counts it as lost",
    "slowed": "computation takes {factor:.2f} times as long beside communication ({origin})",
    "whole_batch": "scaling is by one GPU's time for {samples} samples{how}",
    "share_of_batch": (
        "scaling is by one GPU's time for its share; profiled at two batch sizes, it would be by the whole batch"
    ),
}
"""By kind."""
