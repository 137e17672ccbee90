"""What all tests share. Random inputs come from fixed seeds, named in the report's header.

The place of this file puts the folder on the import path, for the kits that several test folders
share (``gateway_kit`` and others).
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SEED = 20260901

# Deadlines would assert timing; derandomized, each property sees the same examples in every run.
# A loaded machine draws slowly; how fast is never a reason to fail.
settings.register_profile(
    "sekisho",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("sekisho")


def pytest_report_header() -> str:
    return f"seeds: numpy {SEED} (fixture rng), hypothesis derandomized"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real engines take minutes and are installed apart: only `-m engines` asks for them."""
    if "engines" not in config.option.markexpr:
        real = [item for item in items if item.get_closest_marker("engines")]
        config.hook.pytest_deselected(items=real)
        items[:] = [item for item in items if item not in real]


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that starts anew for every test."""
    return np.random.default_rng(SEED)


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once per machine."""
    from sekisho.engine.demo import ensure_demo_model

    return ensure_demo_model()
