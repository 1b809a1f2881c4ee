"""How long an exact plan takes, beside MG-WFBP's published merge written out as the paper states it.

    python benchmarks/plan.py

Both sides see the same gradients on the same network. The merge recomputes every communication start after every merge
and gives a plan that need not be optimal; `optimal` is exact. `programme` is the decision alone, as the merge is;
`plan()` adds names, validation and a prediction.
"""

from __future__ import annotations

from backbeat import plan, predict
from backbeat.planners.baselines import merge_sweep
from backbeat.planners.optimal import best_ends
from benchmarks.harness import affine, machine, measured_curve, random_profile, seconds
from benchmarks.published_merge import merge

ALPHA_S, BETA_S_PER_BYTE = 6e-4, 1.5e-9
INSTANCES = ((100, 0.06), (300, 0.06), (1000, 0.06), (3000, 0.06), (3000, 6.0))
"""Gradients and backward time; the last leaves the link idle at times, so that fewer gradients are merged."""


def beside_the_merge() -> None:
    line, curve = affine(ALPHA_S, BETA_S_PER_BYTE), measured_curve(ALPHA_S, BETA_S_PER_BYTE)
    sides = ("merge", "one pass", "programme", "on curve", "plan()", "on curve")
    print("milliseconds; `merge` is the published one as written, the rest is backbeat's")
    header = "  ".join(f"{side:>9}" for side in sides)
    print(f"gradients  backward  merges  {header}  merge/programme  on curve  merge/plan()")
    for count, backward_s in INSTANCES:
        profile = random_profile(count, backward_s=backward_s)
        ready, sizes = profile.ready.tolist(), profile.sizes.tolist()
        repeats = 20 if count <= 1000 else 3
        merged = merge(ready, sizes, ALPHA_S, BETA_S_PER_BYTE)
        if merged != merge_sweep(ready, sizes, ALPHA_S, BETA_S_PER_BYTE, patience_s=ALPHA_S):
            raise SystemExit("the one-pass merge and the published one disagree")
        times = [
            seconds(action, repeats=repeats)[0] * 1e3
            for action in (
                lambda: merge(ready, sizes, ALPHA_S, BETA_S_PER_BYTE),  # noqa: B023
                lambda: merge_sweep(ready, sizes, ALPHA_S, BETA_S_PER_BYTE, ALPHA_S),  # noqa: B023
                lambda: best_ends(profile, line.cost),  # noqa: B023
                lambda: best_ends(profile, curve.cost),  # noqa: B023
                lambda: plan(profile, line, "optimal"),  # noqa: B023
                lambda: plan(profile, curve, "optimal"),  # noqa: B023
            )
        ]
        cells = "  ".join(f"{value:>9.2f}" for value in times)
        ratios = f"{times[0] / times[2]:>15.0f}  {times[0] / times[3]:>8.0f}  {times[0] / times[4]:>12.0f}"
        print(f"{count:>9}  {backward_s:>6} s  {count - len(merged):>6}  {cells}  {ratios}")


def large() -> None:
    """A hundred thousand gradients."""
    count = 100_000
    profile = random_profile(count, backward_s=60.0)
    for network in (affine(ALPHA_S, BETA_S_PER_BYTE), measured_curve(ALPHA_S, BETA_S_PER_BYTE)):
        programme, _ = seconds(lambda: best_ends(profile, network.cost), repeats=1)  # noqa: B023
        whole, _ = seconds(lambda: plan(profile, network, "optimal"), repeats=1)  # noqa: B023
        made = plan(profile, network, "optimal")
        again, _ = seconds(lambda: predict(profile, network, made), repeats=1)  # noqa: B023
        print(
            f"L = {count}, {network.name}: programme {programme:.2f} s, plan() {whole:.2f} s, "
            f"predict() {again:.2f} s, {len(made.buckets)} buckets"
        )


if __name__ == "__main__":
    print(machine())
    beside_the_merge()
    large()
