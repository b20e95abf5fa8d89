"""The environment of a job, and the hooks inside its Python interpreters.

Has no code of the daemon. `environment` turns a lease into variables and the pool limits of
frameworks, with the defaults of `overhead`; `hooks` runs in the job; `prover` tests the enforcement
of a lease from inside a job; `container_command` passes a lease on to a container; `kernel_main` is
a Jupyter kernel, and `notebook_main` executes a notebook.
"""
