"""The program that sends a notification: `python -m gpulease.notify`, which runs as the user.

It alone reads [notify] in the user's file, and contacts receivers.
"""
