/* What _native.c, _drawing.c and _stepping.c have in common: Python, numpy, and how arguments are read. */

#ifndef PENSTOCK_BUFFERS_NATIVE_H
#define PENSTOCK_BUFFERS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL penstock_numpy /* _native.c imports numpy for all */
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>
#include <numpy/arrayobject.h>

typedef PyObject *const *Arguments;

/* Returns 1 if the numbers are equal, else 0 with an exception set. */
static inline int check_arguments(Py_ssize_t given, Py_ssize_t expected) {
    return given == expected || PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, given);
}

/* Convert `argument` to an index. Returns 1, or 0 with an exception set. */
static inline int read_index(PyObject *argument, Py_ssize_t *index) {
    *index = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    return *index != -1 || !PyErr_Occurred();
}

/* In _stepping.c. */
PyObject *penstock_step_ordinary(PyObject *, Arguments, Py_ssize_t);
PyObject *penstock_store_game_step(PyObject *, Arguments, Py_ssize_t);
PyObject *penstock_shift_rows(PyObject *, Arguments, Py_ssize_t);
/* In _drawing.c. */
PyObject *penstock_draw_rows(PyObject *, Arguments, Py_ssize_t);

#endif
