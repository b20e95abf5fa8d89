#!/bin/bash
# A program that is not Python gets the second GPU of the job.
program=(bash -c 'echo "program: $CUDA_VISIBLE_DEVICES"')

IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES=${gpus[1]} "${program[@]}"

# gpulease run reads the number as the hook in a Python does.
CUDA_VISIBLE_DEVICES=1 gpulease run -- "${program[@]}"
