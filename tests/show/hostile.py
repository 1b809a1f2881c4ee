"""Names that try to be more than text, and a job that carries them."""

from __future__ import annotations

from msgspec.structs import replace

from backbeat.model import Memory, Network, Profile
from tests.problems import curve, make_profile

MARKUP = '</script><script>window.hurt = 1</script><img src=x onerror="window.hurt = 1">'
NAMES = [MARKUP, "<b>bold</b>", "a&amp;b", "\"quoted'", "{{ 7 * 7 }}", "%{x}", "=1+1", "line\nbreak", "\u2028", "ünï"]


def hostile_profile() -> Profile:
    sizes = [10**6 * (index + 1) for index in range(len(NAMES))]
    made = make_profile(sizes, [1e-3 * (index + 1) for index in range(len(NAMES))], forward=6e-3)
    gradients = tuple(replace(one, name=name) for one, name in zip(made.gradients, NAMES, strict=True))
    memory = Memory(parameter_bytes=10**9, gradient_bytes=10**9, activation_bytes=5 * 10**9, peak_bytes=8 * 10**9)
    return replace(
        made,
        gradients=gradients,
        name=MARKUP,
        model=MARKUP,
        device=MARKUP,
        memory=memory,
        notes=(MARKUP,),
        iteration_s=tuple(0.016 + 1e-5 * index for index in range(30)),
    )


def hostile_network() -> Network:
    points = [(1024, 2e-4), (2**16, 3e-4), (2**20, 1.2e-3), (2**24, 15e-3)]
    return replace(curve(points), name=MARKUP, notes=(MARKUP,))
