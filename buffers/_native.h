/* What _native.c, agents/_drawing.c and columns/_stepping.c have in common: Python, numpy, how arguments are read, and
   how functions are listed. Each file is a module of its own. */

#ifndef PENSTOCK_BUFFERS_NATIVE_H
#define PENSTOCK_BUFFERS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
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

/* An entry of a module's table of functions. */
#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

#endif
