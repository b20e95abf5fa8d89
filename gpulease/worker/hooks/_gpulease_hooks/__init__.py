"""The hooks inside a job's Python: one module for each framework, and what they share.

sitecustomize loads this package by path when a framework is imported. It uses the standard library
only, and no syntax newer than Python 3.6. The module of a framework has `install(module, lease,
report_failure)`, which takes the imported module, the lease as JSON from GPULEASE_HOOK, and a
function for failures, and returns a function that removes the hook. To add a framework, add such a
module and an entry in sitecustomize.HOOKS.

An interpreter may have started before an upgrade in place, with an older sitecustomize and older
modules of this package in memory. So the modules named in HOOKS, `devices.inside`, `running` and
the public names of `lease` and `report` keep their names and parameters.
"""
