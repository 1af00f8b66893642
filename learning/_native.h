/* What _native.c and _rows.c have in common: Python, numpy, the flags of a row, and arrays as arguments. */

#ifndef PENSTOCK_REPLAYS_NATIVE_H
#define PENSTOCK_REPLAYS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL penstock_replays_numpy /* _native.c imports numpy for both */
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>
#include <numpy/arrayobject.h>

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address)
#endif

typedef PyObject *const *Arguments;

enum { VALID = 1, TERMINATED = 2, TRUNCATED = 4, BEGINS = 8, PARTIAL = 16, CUT = 32, RESUMES = 64 }; /* as in ring.py */

/* Returns 1 if the numbers are equal. All functions here that return 0 or 1 return 0 with an exception set. */
static inline int check_arguments(Py_ssize_t given, Py_ssize_t expected) {
    return given == expected || PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
}

/* Set `line` to `object`, which must be a contiguous array of one dimension with this type of numbers. */
static inline int read_line(PyObject *object, int type, PyArrayObject **line) {
    *line = (PyArrayObject *)object;
    int fits = PyArray_CheckExact(object) && PyArray_NDIM(*line) == 1 && PyArray_TYPE(*line) == type &&
               PyArray_ISCARRAY(*line);
    return fits || PyErr_Format(PyExc_TypeError, "expected a contiguous array of one dimension and of the right dtype");
}

/* In _rows.c. */
PyObject *pack_flags(PyObject *, Arguments, Py_ssize_t), *copy_rows(PyObject *, Arguments, Py_ssize_t),
    *same_rows(PyObject *, Arguments, Py_ssize_t), *take_rows(PyObject *, Arguments, Py_ssize_t),
    *read_ages(PyObject *, Arguments, Py_ssize_t), *take_frames(PyObject *, Arguments, Py_ssize_t);

#endif
