"""Keep that many processes busy for some seconds, and print the work that was done in each."""

import multiprocessing
import sys
import time


def work(place: int) -> None:
    block = bytearray(1 << 18)
    while True:
        for at in range(0, len(block), 4096):
            block[at] = (block[at] + 1) & 255
        counts[place] += 1


if __name__ == "__main__":
    processes, seconds = int(sys.argv[1]), int(sys.argv[2])
    counts = multiprocessing.Array("q", processes, lock=False)
    for place in range(processes):
        multiprocessing.Process(target=work, args=(place,), daemon=True).start()
    before = 0
    for _ in range(seconds):
        time.sleep(1)
        now = sum(counts)
        sys.stdout.write(f"{now - before}\n")
        sys.stdout.flush()
        before = now
