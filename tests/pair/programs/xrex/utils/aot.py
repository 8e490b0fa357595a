"""Stands where x-algorithm's copy of the unpickler does."""

from vendored.aot import _JaxPjrtUnpickler as _JaxPjrtUnpickler
