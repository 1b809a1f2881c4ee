from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="profiles are measured with PyTorch")
