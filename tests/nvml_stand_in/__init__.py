"""A stand-in for NVIDIA's driver library, with its real ABI, that says what a test tells it to.

    stand_in = StandIn(tmp_path, gpus=[Card(total=80 * G, used=61 * G, processes=[(pid, 60 * G)])])
    subprocess.run([...], env=os.environ | stand_in.environment())
    stand_in.change(0, lost=True)

Any process started with that environment finds these GPUs, through an unchanged nvidia-ml-py.
"""

from nvml_stand_in.library import DRIVER
from nvml_stand_in.probe_process import ProbeProcess
from nvml_stand_in.state import HANG, Card, Code, Part, StandIn, Told

__all__ = ["DRIVER", "HANG", "Card", "Code", "Part", "ProbeProcess", "StandIn", "Told"]
