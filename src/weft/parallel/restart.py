"""What torchrun tells a process of the job it belongs to, which may have failed and been started again."""

import os


def restarts() -> int:
    """How often torchrun has started this job's processes again (`--max-restarts`)."""
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(given) if given.isdigit() else 0


def job() -> str | None:
    """A name that a job keeps when its processes are started again; None outside of torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    return f"agent {os.getppid()}" if name == "none" else name  # without a name of its own: the torchrun that waits
