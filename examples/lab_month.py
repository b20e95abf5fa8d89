"""Write a month of a made-up lab as a trace for `gpulease replay`; it is always the same.

python examples/lab_month.py > lab.csv
gpulease replay lab.csv --servers 4x24G
"""

import csv
import random
import sys

DAY, HOUR = 86400, 3600
random_ = random.Random(2024)
jobs = []


def submit(at, hours, gpus, gib, user, command, limit=""):  # an empty limit is none
    duration = hours * HOUR * random_.uniform(0.7, 1.4)
    jobs.append((round(at), round(duration), gpus, round(gib * 1024), user, limit, command))


for day in range(28):
    morning = day * DAY + 9 * HOUR
    weekday = day % 7 < 5
    if weekday:
        # Carol debugs: many short runs in little memory, an hour at most.
        for _ in range(random_.randint(5, 15)):
            submit(morning + random_.uniform(0, 9) * HOUR, 0.1, 1, 6, "carol", "debug.py", HOUR)
        # Dave trains one model in the evening.
        submit(morning + 9 * HOUR, 7, 1, 20, "dave", "train.py", 12 * HOUR)
    if day % 7 in (1, 4):
        # Alice submits a sweep at once; she asks for a fifth of a GPU and gives a time limit.
        for number in range(30):
            submit(morning + number, 1.5, 1, 5, "alice", f"sweep.py --seed {number}", 4 * HOUR)
    if day % 7 in (1, 2):
        # Bob needs two GPUs for most of a day, and gives no limit.
        submit(morning + 2 * HOUR, 8, 2, 22, "bob", "pretrain.py")

writer = csv.writer(sys.stdout, lineterminator="\n")
writer.writerow(
    ("job", "submit_s", "duration_s", "gpus", "memory_mib", "user", "time_limit_s", "command")
)
writer.writerows((number, *job) for number, job in enumerate(sorted(jobs), 1))
