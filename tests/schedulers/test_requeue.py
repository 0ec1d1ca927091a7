"""The batch script of `buildkit slurm` on a real Slurm: after a warning it saves, is requeued, and resumes."""

from dataclasses import replace
from pathlib import Path

from buildkit.host.machine import read_machine
from buildkit.running.flags import RunRequest
from buildkit.running.slurm import SlurmOptions, slurm_text
from tests.schedulers.conftest import Cluster

IMAGES = Path(__file__).parents[2] / "images"
OPTIONS = ("--deadline", "200", "--num-cpus", "1", "--object-store-memory", "100000000")
RUN = """
import os, pathlib, ray, signal, sys, time

saved = pathlib.Path("/tmp/saved-step")
asked = []

@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, step):
        self.step = step
    def work(self):
        self.step += 1
    def state(self):
        time.sleep(3)  # longer than Ray's processes live after SIGTERM
        return ray.get_runtime_context().get_node_id(), self.step

ray.init(log_to_driver=False)
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # after Ray has set its own handler
step = int(saved.read_text()) if saved.exists() else 0
print("start", os.environ.get("SLURM_RESTART_COUNT", "0"), "at step", step, flush=True)
ranks = [Rank.remote(step) for _ in range(2)]
ray.get([rank.work.remote() for rank in ranks])
print("working", flush=True)
while not asked and step == 0:
    time.sleep(0.1)
states = dict(ray.get([rank.state.remote() for rank in ranks]))
saved.write_text(str(min(states.values())))
print("saved step", saved.read_text(), "of", len(states), "nodes", flush=True)
sys.exit(143 if asked else 0)
"""


def test_a_warned_job_saves_is_requeued_starts_clean_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    request = RunRequest("slipway:cpu", "cpu", (*OPTIONS, "--", "python", "/tmp/run.py"), nodes=2, name="warned")
    options = SlurmOptions(container="none", log="/tmp/warned.out", exclusive=False)
    machine = replace(read_machine(tmp_path), uid=0)
    cluster.run("rm -f /tmp/saved-step")
    cluster.put("/tmp/run.py", RUN)
    cluster.put("/tmp/job.sh", slurm_text(request, machine, IMAGES, options))
    job = cluster.run("PATH=/opt/slipway/venv/bin:$PATH sbatch --parsable /tmp/job.sh").output.strip()
    cluster.wait_until("cat /tmp/warned.out", "working")
    cluster.run(f"scancel --batch --signal=USR1 {job}")  # as Slurm does 120 s before the time limit
    cluster.wait_until("cat /tmp/warned.out", "saved step 2 of 2 nodes")
    told = cluster.run("cat /tmp/warned.out").output
    assert "start 0 at step 0" in told
    assert "saved step 1 of 2 nodes" in told
    assert "start 1 at step 1" in told
    cluster.wait_until(f"scontrol show job {job}", "JobState=COMPLETED")
    assert cluster.ray_processes() == ""


def test_a_cancelled_job_saves_before_it_ends(cluster: Cluster) -> None:
    cluster.run("rm -f /tmp/saved-step")
    cluster.put("/tmp/run.py", RUN)
    launch = f"/opt/slipway/venv/bin/launch {' '.join(OPTIONS)} -- /opt/slipway/venv/bin/python /tmp/run.py"
    job = cluster.start(
        f"srun -J cancelled -N2 -n2 {launch} 2>&1 | tee /tmp/cancelled.out", SLIPWAY_TOKEN="a secret of this test"
    )
    cluster.wait_until("cat /tmp/cancelled.out", "working")
    cluster.run("scancel --name cancelled")
    assert "saved step 1 of 2 nodes" in job().output
    assert cluster.ray_processes() == ""
