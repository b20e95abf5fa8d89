"""What the hooks do inside a job's Python: one module for each framework, and what they share.

Loaded by path, from sitecustomize, when a framework is imported; standard library only, and no
syntax newer than Python 3.7. A framework's module has `install(module, raw, trouble)`: the module
just imported, the lease as it stands in GPULEASE_HOOK, and how to report what failed. To hook
another framework, put such a module here and name it in sitecustomize.HOOKS.
"""
