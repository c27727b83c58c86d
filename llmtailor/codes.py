"""Stable codes for every kind of finding, for programs. Texts may change, codes don't.

docs/make/pages.py writes the list in docs/findings.md from here.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """A kind of problem: its code and its meaning."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Code:
        code = object.__new__(cls)
        code._value_ = name
        code.meaning = meaning
        return code

    # the checkpoint as a whole
    NO_CHECKPOINT = "no-checkpoint", "the folder is not a checkpoint"
    UNSUPPORTED = "unsupported", "an intact checkpoint of a kind that can't be read"
    DAMAGED = "damaged", "the content contradicts itself in a way that has no code of its own"
    FOLDER_STEP = "folder-step", "the folder's name states a different step than its content"
    LINKS_OUTSIDE = "links-outside", "files are, or are symbolic links to, files outside the folder"

    # files
    FILE_MISSING = "file-missing", "a file is missing"
    FILE_DAMAGED = "file-damaged", "a file is truncated, or not of the format its name implies"
    COMPRESSED = "compressed", "a torch file is compressed: a resume reads it, but llmtailor can't"
    LEGACY = "legacy", "a torch file is in the format from before torch 1.6: a resume reads it, but llmtailor can't"
    FILE_UNREADABLE = "file-unreadable", "the operating system refuses to read a file"
    FILE_CHANGED = "file-changed", "a file changed while it was being read"
    NOT_A_FILE = "not-a-file", "a folder, pipe, socket or device has the name of a file"
    FILE_NAME = "file-name", "a resume won't find a file or folder under its name, or finds the wrong one"
    FILE_UNKNOWN = "file-unknown", "there are files of more ranks than the run had"
    FILE_SWAPPED = "file-swapped", "a file belongs to another rank"
    UNSAFE_PICKLE = "unsafe-pickle", "a pickle names a global that no checkpoint needs"

    # fields of files
    FIELD_MISSING = "field-missing", "a field that a resume reads is missing"
    FIELD_TYPE = "field-type", "a field is not of the type that a resume needs"
    FIELD_RANGE = "field-range", "a field has an impossible value: not finite, negative, zero or far too large"
    FIELD_UNKNOWN = "field-unknown", "a field, param or state that nothing else in the checkpoint mentions"
    FIELD_CONFLICT = "field-conflict", "two fields that should agree contradict each other"
    RANKS_DIFFER = "ranks-differ", "the ranks' files differ where they must be alike"
    STEPS_DIFFER = "steps-differ", "files are of different saves"

    # states
    STATE_MISSING = "state-missing", "a state of a param is missing"
    STATE_SIZE = "state-size", "a tensor's number of elements or shape differs from its param's"
    STATE_DTYPE = "state-dtype", "a state's dtype differs from the one the run uses"
    STATE_LAYOUT = "state-layout", "a tensor is not contiguous in its file"
    NOT_FINITE = "not-finite", "a state holds NaN or infinity"
    ALL_ZERO = "all-zero", "the moments of a whole flat tensor are zero, although Adam has made steps"
    NEGATIVE = "negative", "a mean of squares is negative"
    ROUNDED = "rounded", "a partial checkpoint holds rounded states"
    NOT_ROUNDABLE = "not-roundable", "a moment has elements that can't be stored in 8 bits"
    NOT_ROUNDED = "not-rounded", "a weight is not its rounded master weight"
    SPLIT_WEIGHTS = "split-weights", "weights differ from their master weights on purpose (--allow-split)"
    TIED = "tied", "tied names point to nothing, or to each other"
    FROZEN_MISSING = "frozen-missing", "a frozen param's values are missing"

    # weights and config beside DeepSpeed's files
    WEIGHTS_MISSING = "weights-missing", "there are no weights in safetensors form, or only of some params"
    WEIGHTS_UNKNOWN = "weights-unknown", "there are weights that the optimizer's files don't mention"
    WEIGHTS_SHAPE = "weights-shape", "a weight's shape differs from its param's"
    WEIGHTS_DTYPE = "weights-dtype", "the weights' dtype differs from the one the run trained in"
    WEIGHTS_NAMES = "weights-names", "the weights' names differ from the model's"
    CONFIG_MISSING = "config-missing", "config.json is missing"
    MODEL_UNKNOWN = "model-unknown", "facts that only the model's class states are unknown"

    # scheduler and random numbers
    SCHEDULER_MISSING = "scheduler-missing", "there is no scheduler state"
    SCHEDULER_LENGTH = "scheduler-length", "the scheduler's entries don't match the number of param groups"
    SCHEDULER_RATE = "scheduler-rate", "the scheduler's learning rate differs from the param groups'"
    SCHEDULER_STEP = "scheduler-step", "the scheduler's step differs from the run's"
    RNG_MISSING = "rng-missing", "random number states are missing"
    RNG_SWAPPED = "rng-swapped", "random number states belong to another rank"

    # DeepSpeed
    PARTITION_COUNT = "partition-count", "partition_count is not the number of ranks"
    VERSION_MISSING = "version-missing", "ds_version is missing"
    ELASTIC = "elastic", "an elastic checkpoint that stock DeepSpeed can't resume"
    PRECISION = "precision", "file names, settings and tensors don't agree on the run's precision"

    # what was recorded when the checkpoint was made
    MANIFEST = "manifest", "a manifest is damaged, or the checkpoint does not match it"
    CHECKSUM = "checksum", "bytes do not match their checksum"
    DIGEST = "digest", "states differ from those that were written"
    NOT_COMPARED = "not-compared", "something could not be compared"

    # the attempts of a run
    ABANDONED = "abandoned", "a checkpoint belongs to an abandoned attempt of the run"
    UNRECORDED = "unrecorded", "a checkpoint does not say which attempt of the run wrote it"
    MIXED_ATTEMPTS = "mixed-attempts", "sources are of different attempts of the run"

    # an attested resume
    RESUME_DIFFERS = "resume-differs", "a resumed training does not hold the states of its checkpoint"

    # everything else
    OTHER = "other", "anything that programs need not tell apart"
