"""Programs that torchrun starts: what it sets is all that `init_mesh` needs, and a failure ends all of them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "torchrun_script.py"


def torchrun(fault: str) -> tuple[subprocess.CompletedProcess[str], dict[int, str], float]:
    """Runs the script on two ranks; returns how that ended, what each rank has written, and how many seconds it took.

    torchrun ends all ranks when it sees that one has ended. It looks every second here, not every 0.1 s, so that on a
    busy machine too a rank can write why it fails.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--tee=3"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--monitor-interval=1", str(SCRIPT), fault], capture_output=True, text=True, timeout=100
    )
    lines = (done.stdout + done.stderr).splitlines()
    written = {rank: [line for line in lines if line.startswith(f"[default{rank}]:")] for rank in (0, 1)}
    return done, {rank: "\n".join(of_rank) for rank, of_rank in written.items()}, time.monotonic() - start


def test_two_ranks_train_alike():
    done, written, _ = torchrun("none")
    assert done.returncode == 0, done.stderr
    losses = [re.findall(r"rank \d of 2, step (\d): loss (\S+)", said) for said in written.values()]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == ["0", "1"]
    first, second = (float.fromhex(loss) for _, loss in losses[0])
    assert second < first


def test_a_rank_that_raises_in_backward_ends_all_and_the_other_says_whose_fault_it_was():
    done, written, seconds = torchrun("raise")
    assert done.returncode != 0 and seconds < 60
    assert "RankFailure: rank 1 raised in step 2: ValueError: user bug" in written[0], done.stderr
    assert "ValueError: user bug" in written[1] and "RankFailure" not in written[1]
