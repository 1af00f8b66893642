/* Makes trajectory infos of the records that workers have written. native.py says what the function does. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

typedef PyObject *const *Arguments;

/* RECORD of results.py; _native.c has its layout. */
typedef struct {
    int64_t t, env_rank, length;
    double return_;
    int64_t nonzero_rewards;
    double discounted_return;
} Record;

static int compare(const void *a, const void *b) {
    const Record *one = *(const Record *const *)a, *other = *(const Record *const *)b;
    if (one->t != other->t) {
        return one->t < other->t ? -1 : 1;
    }
    return (one->env_rank > other->env_rank) - (one->env_rank < other->env_rank);
}

enum { LENGTH, RETURN, NONZERO_REWARDS, DISCOUNTED_RETURN, N_NAMES };
static const char *const texts[N_NAMES] = {"Length", "Return", "NonzeroRewards", "DiscountedReturn"};
static PyObject *names[N_NAMES], *no_arguments;

/* Called once. Returns 0 with an exception set if that fails. */
int penstock_make_figure_names(void) {
    for (int i = 0; i < N_NAMES; i++) {
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL) {
            return 0;
        }
    }
    no_arguments = PyTuple_New(0);
    return no_arguments != NULL;
}

/* Set an attribute to `value`, and release it. Returns 0 with an exception set if that fails. */
static int set(PyObject *info, int name, PyObject *value) {
    int is_set = value != NULL && PyObject_SetAttr(info, names[name], value) == 0;
    Py_XDECREF(value);
    return is_set;
}

static PyObject *make_info(PyTypeObject *cls, const Record *record) {
    PyObject *info = cls->tp_new(cls, no_arguments, NULL);
    if (info != NULL && set(info, LENGTH, PyLong_FromLongLong(record->length)) &&
        set(info, RETURN, PyFloat_FromDouble(record->return_)) &&
        set(info, NONZERO_REWARDS, PyLong_FromLongLong(record->nonzero_rewards)) &&
        set(info, DISCOUNTED_RETURN, PyFloat_FromDouble(record->discounted_return))) {
        return info;
    }
    Py_XDECREF(info);
    return NULL;
}

/* Store pointers to `count` records of `memory` from `start` on. Returns how many, or -1 with an exception set. */
static Py_ssize_t find_records(PyObject *memory, Py_ssize_t start, Py_ssize_t count, const Record **found) {
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    Py_ssize_t size = view.len / (Py_ssize_t)sizeof(Record);
    int fits = start >= 0 && count >= 0 && count <= size && start <= size - count &&
               (uintptr_t)view.buf % sizeof(int64_t) == 0;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        found[i] = (const Record *)view.buf + start + i;
    }
    PyBuffer_Release(&view); /* the argument keeps the memory */
    if (!fits) {
        PyErr_Format(PyExc_IndexError, "there are not %zd records from %zd on", count, start);
    }
    return fits ? count : -1;
}

static PyObject *make_infos(PyTypeObject *cls, const Record **found, Py_ssize_t n) {
    PyObject *infos = PyList_New(n);
    for (Py_ssize_t i = 0; infos != NULL && i < n; i++) {
        PyObject *info = make_info(cls, found[i]);
        if (info == NULL) {
            Py_CLEAR(infos);
        } else {
            PyList_SET_ITEM(infos, i, info);
        }
    }
    return infos;
}

PyObject *penstock_infos_of_records(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (n != 4) {
        return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", n);
    }
    if (!PyType_Check(arguments[0]) || ((PyTypeObject *)arguments[0])->tp_new == NULL || !PyList_Check(arguments[1]) ||
        !PyList_Check(arguments[2]) || !PyList_Check(arguments[3])) {
        return PyErr_Format(PyExc_TypeError, "expected a class and three lists");
    }
    PyObject *memories = arguments[1], *starts = arguments[2], *counts = arguments[3];
    Py_ssize_t n_workers = PyList_GET_SIZE(memories), total = 0, n_found = 0;
    if (PyList_GET_SIZE(starts) != n_workers || PyList_GET_SIZE(counts) != n_workers) {
        return PyErr_Format(PyExc_ValueError, "the lists differ in length");
    }
    for (Py_ssize_t i = 0; i < n_workers; i++) {
        Py_ssize_t count = PyNumber_AsSsize_t(PyList_GET_ITEM(counts, i), PyExc_OverflowError);
        if (count < 0 || count > PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(Record) - total) {
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "impossible number of records");
        }
        total += count;
    }
    const Record **found = PyMem_Malloc((total + 1) * sizeof(*found));
    if (found == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < n_workers; i++) {
        Py_ssize_t start = PyNumber_AsSsize_t(PyList_GET_ITEM(starts, i), PyExc_OverflowError);
        Py_ssize_t count = PyNumber_AsSsize_t(PyList_GET_ITEM(counts, i), PyExc_OverflowError);
        if (PyErr_Occurred() || count > total - n_found) {
            count = -1;
        } else {
            count = find_records(PyList_GET_ITEM(memories, i), start, count, found + n_found);
        }
        if (count < 0) {
            PyMem_Free(found);
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the counts have changed");
        }
        n_found += count;
    }
    qsort(found, n_found, sizeof(*found), compare);
    PyObject *infos = make_infos((PyTypeObject *)arguments[0], found, n_found);
    PyMem_Free(found);
    return infos;
}
