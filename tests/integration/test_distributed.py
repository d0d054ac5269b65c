"""DTensor and FSDP2 on two processes: the same results as one. One start of the processes serves every check."""

from pathlib import Path

import pytest
import torch.multiprocessing

from tests.integration import distributed_checks


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> Path:
    """A folder with a traceback for each check that failed, by its name."""
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(distributed_checks.work, (str(folder),), nprocs=2)
    assert len(list(folder.glob("done.*"))) == 2
    return folder


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_processes(failures, name):
    for path in failures.glob(f"{name}.*"):
        pytest.fail(path.read_text(encoding="utf-8"), pytrace=False)
