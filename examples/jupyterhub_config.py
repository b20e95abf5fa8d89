"""JupyterHub, where each user's server is a job: its notebooks share one lease.

jupyterhub -f jupyterhub_config.py

Users choose the memory when they start their server. It waits in the queue like any job, and the
lease ends with the server. The hub runs as root, and starts gpulease as the user.
"""

from jupyterhub.spawner import LocalProcessSpawner
from traitlets import Unicode
from traitlets.config import get_config

c = get_config()


class GpuleaseSpawner(LocalProcessSpawner):
    """Starts a user's server by `gpulease run`."""

    gpulease = Unicode("/opt/gpulease/bin/gpulease", config=True, help="The command.")
    memory = Unicode("4G", config=True, help="Memory on each GPU, unless the user chooses another.")

    async def start(self):
        memory = str(self.user_options.get("memory") or self.memory)
        self.cmd = [
            self.gpulease, "run", "--mem", memory, "--name", "jupyterhub",
            "--no-pty", "--end-with-command", "--", "jupyterhub-singleuser",
        ]  # fmt: skip
        return await super().start()

    def options_from_form(self, form):
        return {"memory": form["memory"][0]}


c.JupyterHub.spawner_class = GpuleaseSpawner
c.Spawner.options_form = 'GPU memory: <input name="memory" value="4G">'
# Seconds in the queue and for the start, before the hub gives up and cancels the job.
c.Spawner.start_timeout = 600
