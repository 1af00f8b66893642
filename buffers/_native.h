/* What the compiled parts have in common. */

#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

/* The words of a progress row that are written here, as control.py has them. */
enum { PHASE = 0, ROW_T = 1, ENV_RANK = 2, HEARTBEAT = 3, RESETTING = 10 };

typedef PyObject *const *Arguments;

static inline int has_arguments(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) {
        return 1;
    }
    PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, got %zd", wanted, given);
    return 0;
}

/* Whether `argument` is an index, which goes to `index`; 0 with an exception set if it is none. */
static inline int has_index(PyObject *argument, Py_ssize_t *index) {
    *index = PyNumber_AsSsize_t(argument, PyExc_IndexError);
    return *index != -1 || !PyErr_Occurred();
}

/* An entry of a module's functions. */
#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

#endif
