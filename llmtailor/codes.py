"""What is wrong, for programs: a stable code for every kind of finding. Texts may change, codes don't.

docs/findings.md lists them; scripts/make_docs.py makes that list from here.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """A kind of problem: its name on the outside, and what it means."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Code:
        code = object.__new__(cls)
        code._value_ = name
        code.meaning = meaning
        return code

    # the checkpoint as a whole
    NO_CHECKPOINT = "no-checkpoint", "the folder is no checkpoint"
    UNSUPPORTED = "unsupported", "a whole checkpoint of a kind that can't be read"
    DAMAGED = "damaged", "the content contradicts itself in a way that has no code of its own"
    FOLDER_STEP = "folder-step", "the folder is named after another step than its content is of"
    LINKS_OUTSIDE = "links-outside", "files are symbolic links out of the folder"

    # files
    FILE_MISSING = "file-missing", "a file is missing"
    FILE_DAMAGED = "file-damaged", "a file is cut short, or not of the format that its name says"
    COMPRESSED = "compressed", "a torch file is compressed: a resume reads it, and it can't be looked into here"
    FILE_UNREADABLE = "file-unreadable", "the operating system won't read a file"
    FILE_CHANGED = "file-changed", "a file changed while it was read"
    NOT_A_FILE = "not-a-file", "a folder, pipe, socket or device is in the place of a file"
    FILE_NAME = "file-name", "a resume won't find a file or folder by the name it has, or finds the wrong one"
    FILE_UNKNOWN = "file-unknown", "there are files of more ranks than the run had"
    FILE_SWAPPED = "file-swapped", "a file is another rank's"
    UNSAFE_PICKLE = "unsafe-pickle", "a pickle names a global that no checkpoint needs"

    # fields of files
    FIELD_MISSING = "field-missing", "a field that a resume reads is missing"
    FIELD_TYPE = "field-type", "a field is of another type than a resume takes"
    FIELD_RANGE = "field-range", "a field has a value that no run has: not finite, negative, zero or far too large"
    FIELD_UNKNOWN = "field-unknown", "a field, param or state that nothing else in the checkpoint knows"
    FIELD_CONFLICT = "field-conflict", "a field contradicts another one that says the same thing"
    RANKS_DIFFER = "ranks-differ", "the ranks' files differ in what must be alike"
    STEPS_DIFFER = "steps-differ", "files are of different saves"

    # states
    STATE_MISSING = "state-missing", "a state of a param is missing"
    STATE_SIZE = "state-size", "a tensor has another number of elements, or another shape, than its param"
    STATE_DTYPE = "state-dtype", "a state has another dtype than the run keeps it in"
    STATE_LAYOUT = "state-layout", "a tensor does not lie in its file in one piece"
    NOT_FINITE = "not-finite", "a state holds NaN or infinity"
    ALL_ZERO = "all-zero", "the moments of a whole flat tensor are zero, although Adam has made steps"
    NEGATIVE = "negative", "a mean of squares is below zero"
    NOT_ROUNDED = "not-rounded", "a weight is not its rounded master"
    SPLIT_WEIGHTS = "split-weights", "weights differ from their masters on purpose (--allow-split)"
    TIED = "tied", "tied names lead nowhere, or to each other"
    FROZEN_MISSING = "frozen-missing", "a frozen param's values are missing"

    # weights and config beside DeepSpeed's files
    WEIGHTS_MISSING = "weights-missing", "there are no weights in safetensors form, or not of every param"
    WEIGHTS_UNKNOWN = "weights-unknown", "there are weights of which the optimizer's files know nothing"
    WEIGHTS_SHAPE = "weights-shape", "a weight has another shape than its param"
    WEIGHTS_DTYPE = "weights-dtype", "the weights have another dtype than the run trained in"
    WEIGHTS_NAMES = "weights-names", "the weights go by other names than the model's"
    CONFIG_MISSING = "config-missing", "config.json is missing"
    MODEL_UNKNOWN = "model-unknown", "what only the model's class tells is not known"

    # scheduler and random numbers
    SCHEDULER_MISSING = "scheduler-missing", "there is no scheduler state"
    SCHEDULER_LENGTH = "scheduler-length", "the scheduler has entries for another number of param groups"
    SCHEDULER_RATE = "scheduler-rate", "the scheduler is at another learning rate than the param groups"
    SCHEDULER_STEP = "scheduler-step", "the scheduler is at another step than the run"
    RNG_MISSING = "rng-missing", "random number states are missing"
    RNG_SWAPPED = "rng-swapped", "random number states are another rank's"

    # DeepSpeed
    PARTITION_COUNT = "partition-count", "partition_count is not the number of ranks"
    VERSION_MISSING = "version-missing", "ds_version is missing"
    ELASTIC = "elastic", "an elastic checkpoint that stock DeepSpeed can't resume"
    PRECISION = "precision", "file names, settings and tensors don't agree on the run's precision"

    # what was written down when it was made
    MANIFEST = "manifest", "a manifest is damaged, or the checkpoint is not what it says"
    CHECKSUM = "checksum", "bytes do not match their checksum"
    DIGEST = "digest", "states are not those that were written"
    NOT_COMPARED = "not-compared", "something could not be compared"

    # the attempts of a run
    GIVEN_UP = "given-up", "a checkpoint is of an attempt that the run has given up"
    UNRECORDED = "unrecorded", "a checkpoint does not say which attempt of the run wrote it"
    MIXED_ATTEMPTS = "mixed-attempts", "sources are of different attempts of the run"

    # a resume for a try
    NOT_TRIED = "not-tried", "no resume was tried"
    RESUME_FAILS = "resume-fails", "a stock resume fails"
    RESUME_DIFFERS = "resume-differs", "after a stock resume the engine holds something else than the files"

    # all else
    OTHER = "other", "what no program needs to tell apart"
