"""Notifications of users: what is stored in the daemon's database, and sent as its user.

Which changes of jobs are messages, and what these say, is in `gpulease.domain.notifications`. Here:
other messages (`messages`), those to be sent (`outbox`), attempts to send them (`sender`), and the
program that makes one, `python -m gpulease.notifications`, which runs as the user. It alone reads
[notify] in the user's file (`settings`), and contacts receivers (`receivers`).
"""
