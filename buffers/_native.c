/* How a batch is written and summed up, in C: see native.py, which says what each function does. */

#include "_cells.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

/* The answer of a function: `result` is 1, 0, or -1 with an exception set. */
static PyObject *as_bool(int result) { return result < 0 ? NULL : PyBool_FromLong(result); }

static PyObject *put_row(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Target target = {EACH, 0, 0};
    if (!check_arguments(n, 3) || !read_index(arguments[1], &target.t)) {
        return NULL;
    }
    PyObject *values = arguments[2];
    if (!PyList_CheckExact(values)) {
        target.what = WHOLE;
        return as_bool(fill(arguments[0], target, &values, 1));
    }
    Py_ssize_t size = PyList_GET_SIZE(values);
    if (PyArray_CheckExact(arguments[0]) || size == 0) {
        return PyBool_FromLong(size > 0 && fill_array(arguments[0], target, &PyList_GET_ITEM(values, 0), size));
    }
    PyObject *held = PyList_AsTuple(values); /* the user's code may change the list while names are compared */
    int result = held == NULL ? -1 : fill(arguments[0], target, &PyTuple_GET_ITEM(held, 0), size);
    Py_XDECREF(held);
    return as_bool(result);
}

static PyObject *put_cell(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Target target = {ENTRY, 0, 0};
    if (!check_arguments(n, 4) || !read_index(arguments[1], &target.t) || !read_index(arguments[2], &target.b)) {
        return NULL;
    }
    PyObject *value = arguments[3];
    return as_bool(target.b < 0 ? 0 : fill(arguments[0], target, &value, 1));
}

/* ---- trajectories ------------------------------------------------------------------------------ */

/* A row of `running`: the sums of a trajectory so far, and the weight of its next reward. */
typedef struct {
    double length, return_, nonzero_rewards, discounted_return, weight;
} Sums;

/* A finished trajectory: RECORD of results.py, which is compared with LAYOUT at import. */
typedef struct {
    npy_int64 t, env_rank, length;
    double return_;
    npy_int64 nonzero_rewards;
    double discounted_return;
} Record;
#define LAYOUT "t:i8 env_rank:i8 Length:i8 Return:f8 NonzeroRewards:i8 DiscountedReturn:f8"
_Static_assert(sizeof(Record) == 6 * 8, "a record has padding");

/* `object` if it is a two-dimensional array of `type`, else NULL. */
static PyArrayObject *as_table(PyObject *object, int type) {
    PyArrayObject *array = PyArray_CheckExact(object) ? (PyArrayObject *)object : NULL;
    int fits = array != NULL && PyArray_TYPE(array) == type && PyArray_NDIM(array) == 2 && PyArray_ISBEHAVED_RO(array);
    return fits ? array : NULL;
}

/* Continue `sums` with the rows of column b that are `valid` (NULL: all), step by step as TrajInfo does. Returns the
   first free record. */
static Record *sum_column(PyArrayObject *reward, PyArrayObject *done, PyArrayObject *valid, npy_intp b, Sums *sums,
                          Record *record, Py_ssize_t first_t, npy_int64 env_rank, double discount) {
    Sums sum = *sums;
    for (npy_intp t = 0; t < PyArray_DIM(reward, 0); t++) {
        if (valid != NULL && !*(npy_bool *)PyArray_GETPTR2(valid, t, b)) {
            continue;
        }
        double number = *(npy_float32 *)PyArray_GETPTR2(reward, t, b);
        sum.length += 1;
        sum.return_ += number;
        sum.nonzero_rewards += number != 0;
        sum.discounted_return += sum.weight * number;
        sum.weight *= discount;
        if (*(npy_bool *)PyArray_GETPTR2(done, t, b)) {
            *record++ = (Record){first_t + t, env_rank, (npy_int64)sum.length, sum.return_,
                                 (npy_int64)sum.nonzero_rewards, sum.discounted_return};
            sum = (Sums){.weight = 1};
        }
    }
    *sums = sum;
    return record;
}

static int same_size(PyArrayObject *table, PyArrayObject *other) {
    return PyArray_DIM(table, 0) == PyArray_DIM(other, 0) && PyArray_DIM(table, 1) == PyArray_DIM(other, 1);
}

static PyObject *sum_episodes(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first_t;
    double discount;
    if (!check_arguments(n, 8) || !read_index(arguments[5], &first_t) ||
        ((discount = PyFloat_AsDouble(arguments[7])) == -1.0 && PyErr_Occurred())) {
        return NULL;
    }
    PyArrayObject *reward = as_table(arguments[0], NPY_FLOAT32), *done = as_table(arguments[1], NPY_BOOL);
    PyArrayObject *valid = as_table(arguments[2], NPY_BOOL), *running = as_table(arguments[3], NPY_FLOAT64);
    PyArrayObject *env_ranks = as_table(arguments[6], NPY_INT64); /* `[1, B]` */
    Block records;                                                /* the only row of `[1, n]` bytes */
    if (reward == NULL || done == NULL || (valid == NULL && arguments[2] != Py_None) || running == NULL ||
        env_ranks == NULL || !find_row(arguments[4], 0, &records)) {
        return PyLong_FromLong(-1);
    }
    npy_intp n_rows = PyArray_DIM(reward, 0), n_columns = PyArray_DIM(reward, 1);
    if (!same_size(reward, done) || (valid != NULL && !same_size(reward, valid)) || !PyArray_ISCARRAY(running) ||
        PyArray_DIM(running, 0) != n_columns || PyArray_DIM(running, 1) * sizeof(double) != sizeof(Sums) ||
        PyArray_DIM(env_ranks, 0) != 1 || PyArray_DIM(env_ranks, 1) != n_columns ||
        records.nbytes < n_rows * n_columns * (npy_intp)sizeof(Record) || (npy_uintp)records.data % sizeof(double) != 0) {
        return PyLong_FromLong(-1);
    }
    Sums *sums = (Sums *)PyArray_DATA(running);
    Record *record = (Record *)records.data;
    for (npy_intp b = 0; b < n_columns; b++) {
        npy_int64 env_rank = *(npy_int64 *)PyArray_GETPTR2(env_ranks, 0, b);
        record = sum_column(reward, done, valid, b, sums + b, record, first_t, env_rank, discount);
    }
    return PyLong_FromSsize_t(record - (Record *)records.data);
}

/* ---- memory ordering --------------------------------------------------------------------------- */

static PyObject *fence(PyObject *Py_UNUSED(module), Arguments Py_UNUSED(arguments), Py_ssize_t n) {
    if (!check_arguments(n, 0)) {
        return NULL;
    }
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

/* ---- the end of the parent process ------------------------------------------------------------- */

/* The kernel signals only this process when its parent exits. So this handler kills the process group. */
static void kill_group(int Py_UNUSED(number)) { kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL); }

static int life_line = -1;

/* The kernel sends SIGIO when anything happens to the pipe. `read` returns 0 when no process has its other end. */
static void look_at_life_line(int number) {
    int kept = errno;
    char byte;
    if (read(life_line, &byte, 1) == 0) {
        kill_group(number);
    }
    errno = kept;
}

/* The argument: the reading end of a pipe whose other end only the parent has. -1 on Linux: there, a signal says it. */
static PyObject *end_group_with_parent(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t reader;
    if (!check_arguments(n, 1) || !read_index(arguments[0], &reader)) {
        return NULL;
    }
    if (reader >= 0) {
        struct sigaction look = {.sa_handler = look_at_life_line, .sa_flags = SA_RESTART};
        life_line = (int)reader;
        int flags = fcntl(life_line, F_GETFL);
        int done = sigaction(SIGIO, &look, NULL) == 0 && fcntl(life_line, F_SETOWN, getpid()) == 0 &&
                   fcntl(life_line, F_SETFL, flags | O_ASYNC | O_NONBLOCK) == 0;
        look_at_life_line(SIGIO); /* the end may have come before */
        return PyBool_FromLong(done);
    }
#ifdef __linux__
    int number = SIGRTMAX - 7; /* a signal without another use */
    struct sigaction action = {.sa_handler = kill_group};
    return PyBool_FromLong(sigaction(number, &action, NULL) == 0 && prctl(PR_SET_PDEATHSIG, number) == 0);
#else
    Py_RETURN_FALSE;
#endif
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    FUNCTION(put_row),
    FUNCTION(put_cell),
    FUNCTION(sum_episodes),
    FUNCTION(fence),
    FUNCTION(end_group_with_parent),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = functions,
};

/* One phase: numpy's C interface is a static variable, so a process can hold one such module. */
PyMODINIT_FUNC PyInit__native(void) {
    import_array();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringMacro(module, LAYOUT) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
