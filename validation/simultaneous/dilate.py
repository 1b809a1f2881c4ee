"""Profiles with the ratio of exposed communication to compute of the ASC-WFBP table: `dilate.py NETWORK FOLDER`.

The table (8 nodes of 4 GPUs, 10 GbE) gives seconds of compute and of exposed communication. Compute of the bundled
profile is multiplied until the prediction on this network has the same ratio; sizes and shapes stay.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from backbeat import Network, Profile, predict

# model: (bundled profile, published compute, published exposed communication under wfbp)
PUBLISHED = {
    "resnet152": ("resnet152-b64-bf16-h200", 0.2737, 0.6822),
    "densenet201": ("densenet201-b32-bf16-h200", 0.2189, 0.5593),
    "inception": ("inception-v3-b64-bf16-h200", 0.1895, 0.5291),
    "bert-base": ("bert-base-b64-bf16-h200", 0.3055, 0.7047),
}


def dilated(profile: Profile, factor: float, name: str) -> Profile:
    return msgspec.structs.replace(
        profile,
        name=name,
        forward_s=profile.forward_s * factor,
        backward_s=profile.backward_s * factor,
        update_s=profile.update_s * factor,
        iteration_s=(),
        gradients=tuple(
            msgspec.structs.replace(
                one,
                ready_s=one.ready_s * factor,
                forward_s=None if one.forward_s is None else one.forward_s * factor,
                activation_bytes=None,
            )
            for one in profile.gradients
        ),
        memory=None,
        blocks=(),
        host_link=None,
        notes=(f"compute is {factor:.3f} times that of {profile.name}",),
    )


def ratio(profile: Profile, network: Network) -> float:
    found = predict(profile, network, "wfbp", broadcast_buffers=False)
    return found.exposed_s / profile.single_s


def main(network_name: str, folder: str) -> None:
    network = Network.load(network_name)
    for name, (bundled, compute_s, exposed_s) in PUBLISHED.items():
        profile = Profile.load(bundled)
        low, high = 0.01, 100.0
        for _ in range(60):
            middle = (low * high) ** 0.5
            if ratio(dilated(profile, middle, ""), network) > exposed_s / compute_s:
                low = middle
            else:
                high = middle
        made = dilated(profile, low, f"asc-{name}")
        made.save(Path(folder) / f"asc-{name}.json")
        found, wanted = ratio(made, network), exposed_s / compute_s
        print(f"{name}: compute × {low:.3f}, exposed over compute {found:.2f}, published {wanted:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
