"""The use cases: a function for each verb, a transaction each, over the ports."""
