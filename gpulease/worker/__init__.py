"""What a job finds when it starts: its environment, and the hooks inside its interpreters.

Carries no code of the daemon. `environment` turns a lease into variables, `overhead` says how
much of a lease a framework's pool may have, and `hooks` runs in the job itself.
"""
