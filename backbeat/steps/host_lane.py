"""The host as a lane of the step: it issues all that the device does, and the device begins nothing before that.

One thread issues a step: forward, backward, a hook for every gradient, a collective for every bucket, the update; under
a memory plan also forwards once more and copies. Calls return at once: streams wait for copies and collectives, the
host does not, and runs ahead into the next steps. It waits for the device in one place only: the wrapper reads the
status message when the next backward opens.

So three chains of work lead from one step to the next, and a step takes as long as the longest of them:

| chain | what is on it |
|---|---|
| device | computation, copies and communication, as if the host were always ahead: what the other modules simulate |
| host | issuing the whole step |
| status | reading the status, backward as the host issues it to an idle device, the communication that ends after it |

A model that waits for its host has time to communicate: exposed communication costs nothing while the host's chain is
longer than the device's.

Left out: the launch queue, which lets the host get about a thousand kernels ahead; and what a training loop itself
waits for, like `loss.item()` or a `GradScaler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE
from backbeat.model.profile import Profile, device_alone

COLLECTIVE_S = 80e-6
"""What queueing a collective costs the host, on the hosts of H200s."""
GRADIENT_S = 3e-6
"""What the wrapper's hook of one gradient costs there. validation/runtime/README.md says where both come from."""
_EVEN = 1e-9
"""Host and device are even, but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLane:
    """What the host takes to issue a step; nothing where the profile does not say."""

    micro_batch_s: float = 0.0
    """Forward and backward of one micro-batch."""
    backward_s: float = 0.0
    """From the moment when the host begins to issue backward until an idle device has done it."""
    update_s: float = 0.0
    by_block: bool = False
    """The profile says what the host takes for each block. Only then `backward_s` is known, and what the wrapper adds
    is counted: other profiles do not keep the device's times apart from the host's."""

    @classmethod
    def of(cls, profile: Profile) -> HostLane:
        """An iteration issued to an idle device can take the host longer than iterations in a row took. Then, and where
        the device waits for the host, the iterations in a row give the host's pace."""
        if profile.host_s is None:
            return cls()
        whole = profile.forward_s + profile.backward_s
        waits = profile.device_s is not None and longer_of(profile.device_s, whole) > profile.device_s
        ahead = 0.0 if waits else max(profile.single_s - profile.host_s, 0.0) / profile.accumulation
        forward = sum(block.host_forward_s or 0.0 for block in profile.blocks)
        backward = [block.host_backward_s or 0.0 for block in reversed(profile.blocks)]
        share = (whole - ahead) / ((forward + sum(backward)) or 1.0)
        return cls(
            micro_batch_s=whole - ahead,
            backward_s=done_s(
                [share * seconds for seconds in backward],
                [block.backward_s for block in reversed(device_alone(profile).blocks)],
            ),
            update_s=profile.update_s,
            by_block=sum(backward) > 0,
        )

    def longer(self, seconds: float, update_s: float = 0.0) -> HostLane:
        """With so much more to issue in every backward, as for blocks that a memory plan does not keep, and in the
        update."""
        return replace(
            self,
            micro_batch_s=self.micro_batch_s + seconds,
            backward_s=self.backward_s + seconds,
            update_s=self.update_s + update_s,
        )

    def step_s(self, micro_batches: int, *, collectives: int = 0, gradients: int = 0) -> float:
        """Issuing a whole step, with so many collectives and hooks of gradients."""
        return micro_batches * self.micro_batch_s + self.update_s + self._added_s(collectives, gradients)

    def paced(
        self,
        step_s: float,
        micro_batches: int,
        *,
        collectives: int = 0,
        gradients: int = 0,
        tail_s: float | None = None,
    ) -> float:
        """How long a step takes that takes `step_s` where the host is ahead; communication ends `tail_s` after backward
        and with it a status message, unless that is None.

        A step of 10 s that the host issues in 8 takes 10, and 12 where the host takes 12. Where backward takes 9 from
        its issue on, communication that ends 4 s after it delays the next step.

        >>> [HostLane(micro_batch_s=host).paced(10.0, 1) for host in (8.0, 12.0)]
        [10.0, 12.0]
        >>> HostLane(micro_batch_s=12.0, backward_s=9.0, by_block=True).paced(11.0, 1, tail_s=4.0)
        13.0
        """
        longest = self.step_s(micro_batches, collectives=collectives, gradients=gradients)
        if self.by_block and tail_s is not None:
            earlier = (micro_batches - 1) * self.micro_batch_s
            longest = max(longest, earlier + self.backward_s + self._added_s(collectives, gradients) + tail_s)
        return longer_of(step_s, longest)

    def _added_s(self, collectives: int, gradients: int) -> float:
        return collectives * COLLECTIVE_S + gradients * GRADIENT_S if self.by_block else 0.0


def done_s(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """When an idle device has done works that the host issues from now on, one after the other.

    Works of 1 and 3 s, each issued in 2 s: they begin at 2 and 4 s.

    >>> done_s([2.0, 2.0], [1.0, 3.0])
    7.0
    """
    issued = done = 0.0
    for host, device in zip(host_s, device_s, strict=True):
        issued += host
        done = max(done, issued) + device
    return done


def longer_of(device_s: float, host_s: float) -> float:
    """The host's time only where it is longer by more than rounding."""
    return host_s if host_s > device_s * (1 + _EVEN) else device_s


def memory_costs(profile: Profile) -> dict[int, list[float]]:
    """For each action of a memory plan, how much longer the host takes for each block: by its share of forward.

    An offloaded block is not measured. It is taken to cost as much as one that is recomputed and its input fetched.
    """
    issued = [block.host_forward_s for block in profile.blocks]
    weights = [block.forward_s if known is None else known for block, known in zip(profile.blocks, issued, strict=True)]
    whole, again = sum(weights), profile.host_recompute_s
    if profile.host_s is None or again is None or whole <= 0:
        again = whole = 0.0
    fetched = again if profile.host_fetch_s is None else profile.host_fetch_s
    totals = {KEEP: 0.0, RECOMPUTE: again, FETCH: fetched, OFFLOAD: fetched}
    return {what: [total * weight / (whole or 1.0) for weight in weights] for what, total in totals.items()}
