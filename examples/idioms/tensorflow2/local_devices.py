"""What this machine has, by device_lib."""

from tensorflow.python.client import device_lib

for device in device_lib.list_local_devices():
    print(device.device_type, device.name, device.memory_limit)
