"""State of the process and of the system, which Python code reads by functions and objects in C. See `places`."""

from __future__ import annotations

import ctypes
import decimal
import gc
import glob
import logging
import mmap
import os
import queue
import shutil
import sqlite3
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from places import registry

PLACES, Place = registry()

LOGGER = logging.getLogger("fckpt.test.place")


class LevelOfGlobalLogger(Place):
    def __init__(self) -> None:
        self.write(2)

    def read(self) -> Any:
        return LOGGER.level // 10

    def write(self, number: int) -> None:
        LOGGER.setLevel(10 * number)


class LevelOfNamedLogger(LevelOfGlobalLogger):
    def read(self) -> Any:
        return 3 - logging.getLogger("fckpt.test.place").isEnabledFor(logging.INFO)


class DecimalPrecision(Place):
    def __init__(self) -> None:
        self.before = decimal.getcontext().prec
        self.write(2)

    def read(self) -> Any:
        return len(str(decimal.Decimal(1) / 3)) - 2

    def write(self, number: int) -> None:
        decimal.getcontext().prec = number

    def close(self) -> None:
        self.write(self.before)


class PrecisionOfContext(DecimalPrecision):
    def read(self) -> Any:
        return decimal.getcontext().prec


class SystemPath(Place):
    def __init__(self) -> None:
        self.length = len(sys.path)

    def read(self) -> Any:
        return 2 + ("fckpt/number" in sys.path)

    def write(self, number: int) -> None:
        sys.path.append("fckpt/number")

    def close(self) -> None:
        del sys.path[self.length :]


class WarningFilters(Place):
    def __init__(self) -> None:
        self.before = list(warnings.filters)

    def read(self) -> Any:
        return 2 + any(entry[0] == "ignore" and entry[4] == 987_654 for entry in warnings.filters)

    def write(self, number: int) -> None:
        warnings.filterwarnings("ignore", lineno=987_654)

    def close(self) -> None:
        vars(warnings)["filters"][:] = self.before


class FileExists(Place):
    def __init__(self) -> None:
        # The name is the same in the plain and the rematerialised run, whose objects are compared.
        self.folder = os.path.join(tempfile.gettempdir(), f"fckpt-{type(self).__name__}-{os.getpid()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        os.mkdir(self.folder)
        self.path = os.path.join(self.folder, "file")

    def read(self) -> Any:
        return 2 + os.path.exists(self.path)

    def write(self, number: int) -> None:
        Path(self.path).touch()

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class FileByPath(FileExists):
    def read(self) -> Any:
        return 2 + Path(self.path).is_file()


class FilesOfFolder(FileExists):
    def read(self) -> Any:
        return 2 + len(glob.glob(f"{self.folder}/*"))


class FileMayBeRead(FileExists):
    def read(self) -> Any:
        return 2 + os.access(self.path, os.R_OK)


class Mask(Place):
    def __init__(self) -> None:
        self.before = os.umask(0o22)

    def read(self) -> Any:
        before = os.umask(0)
        os.umask(before)
        return 3 if before == 0o77 else 2

    def write(self, number: int) -> None:
        os.umask(0o77)

    def close(self) -> None:
        os.umask(self.before)


class RecursionLimit(Place):
    def __init__(self) -> None:
        self.before = sys.getrecursionlimit()

    def read(self) -> Any:
        return 2 + sys.getrecursionlimit() - self.before

    def write(self, number: int) -> None:
        sys.setrecursionlimit(self.before + number - 2)

    def close(self) -> None:
        sys.setrecursionlimit(self.before)


class CollectorEnabled(Place):
    def read(self) -> Any:
        return 2 if gc.isenabled() else 3

    def write(self, number: int) -> None:
        gc.disable()

    def close(self) -> None:
        gc.enable()


class NameOfThread(Place):
    def __init__(self) -> None:
        self.before = threading.current_thread().name
        self.write(2)

    def read(self) -> Any:
        return len(threading.current_thread().name)

    def write(self, number: int) -> None:
        threading.current_thread().name = "a" * number

    def close(self) -> None:
        threading.current_thread().name = self.before


class LockIsTaken(Place):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def read(self) -> Any:
        return 2 + self.lock.locked()

    def write(self, number: int) -> None:
        # A random program may write twice, and a lock that is taken twice waits forever.
        if number > 2:
            self.lock.acquire(blocking=False)
        elif self.lock.locked():
            self.lock.release()


class MappedFile(Place):
    def __init__(self) -> None:
        self.map = mmap.mmap(-1, 16)
        self.write(2)

    def read(self) -> Any:
        return self.map[0]

    def write(self, number: int) -> None:
        self.map[0] = number


class Queue(Place):
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.write(1)
        self.write(1)

    def read(self) -> Any:
        return self.queue.qsize()

    def write(self, number: int) -> None:
        self.queue.put(number)


class Database(Place):
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table numbers(number integer)")
        self.database.execute("insert into numbers values(2)")

    def read(self) -> Any:
        return self.database.execute("select number from numbers").fetchone()[0]

    def write(self, number: int) -> None:
        self.database.execute("update numbers set number = ?", (number,))


class OfC(Place):
    def __init__(self) -> None:
        self.number = ctypes.c_int(2)

    def read(self) -> Any:
        return self.number.value

    def write(self, number: int) -> None:
        self.number.value = number


class ByNameInSystemModules(Place):
    def read(self) -> Any:
        return getattr(sys.modules[__name__], "number", 2)

    def write(self, number: int) -> None:
        globals()["number"] = number


class ByNameInImportedModule(Place):
    def read(self) -> Any:
        return getattr(sys, "fckpt_number", 2)

    def write(self, number: int) -> None:
        vars(sys)["fckpt_number"] = number

    def close(self) -> None:
        vars(sys).pop("fckpt_number", None)


class ErrorArguments(Place):
    def __init__(self) -> None:
        self.error = ValueError(2)

    def read(self) -> Any:
        return self.error.args[0]

    def write(self, number: int) -> None:
        self.error.args = (number,)
