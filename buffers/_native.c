/* What a collector does in every row of a batch, for the usual kinds of data; see native.py.

   numpy has to find out anew with every call what is to be done, which takes longer than doing it where a row has a few
   dozen numbers, the more so as the code for it has been forgotten by the processor since the row before. Here one
   comparison says whether there is nothing to find out. Nothing is ever cast but Python's numbers to float32, and data
   never raise: what is not as it should be is left to numpy, and to those who can say what is wrong with it. */

#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#include <Python.h>
#include <math.h>
#include <numpy/arrayobject.h>
#include <string.h>

typedef PyObject *const *Arguments;

static int has_arguments(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) {
        return 1;
    }
    PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, got %zd", wanted, given);
    return 0;
}

/* ---- arrays ------------------------------------------------------------------------------------ */

/* Whether elements of this type are their bytes: no references, no dates with units, no records. */
static int is_plain(int type) {
    return PyTypeNum_ISBOOL(type) || PyTypeNum_ISNUMBER(type) || type == NPY_HALF;
}

/* `object` as an array that can be written into as one block of plain elements; NULL if it is something else. */
static PyArrayObject *as_target(PyObject *object) {
    if (!PyArray_CheckExact(object)) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_ISCARRAY(array) && is_plain(PyArray_TYPE(array)) ? array : NULL;
}

/* `object` as an array of `type` with the `n` dimensions `shape`, one element behind the other; else NULL. */
static PyArrayObject *as_like(PyObject *object, int type, int n, const npy_intp *shape) {
    if (!PyArray_CheckExact(object)) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int is_like = PyArray_TYPE(array) == type && PyArray_NDIM(array) == n && PyArray_ISCARRAY_RO(array) &&
                  memcmp(PyArray_SHAPE(array), shape, n * sizeof(npy_intp)) == 0;
    return is_like ? array : NULL;
}

static int copied(PyObject *into, PyObject *from) {
    PyArrayObject *target = as_target(into);
    if (target == NULL) {
        return 0;
    }
    PyArrayObject *value = as_like(from, PyArray_TYPE(target), PyArray_NDIM(target), PyArray_SHAPE(target));
    if (value == NULL) {
        return 0;
    }
    memmove(PyArray_DATA(target), PyArray_DATA(value), PyArray_NBYTES(target));
    return 1;
}

static int is_in_row(PyArrayObject *row, Py_ssize_t b, PyObject *object) {
    PyArrayObject *value = as_like(object, PyArray_TYPE(row), PyArray_NDIM(row) - 1, PyArray_SHAPE(row) + 1);
    if (value == NULL) {
        return 0;
    }
    memmove(PyArray_BYTES(row) + b * PyArray_STRIDE(row, 0), PyArray_DATA(value), PyArray_NBYTES(value));
    return 1;
}

/* ---- copies ------------------------------------------------------------------------------------ */

static PyObject *copy(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    return has_arguments(n, 2) ? PyBool_FromLong(copied(arguments[0], arguments[1])) : NULL;
}

static PyObject *copy_fields(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 2)) {
        return NULL;
    }
    PyObject *targets = arguments[0], *values = arguments[1];
    if (!PyDict_CheckExact(targets) || !PyDict_CheckExact(values) || PyDict_GET_SIZE(targets) != PyDict_GET_SIZE(values)) {
        Py_RETURN_FALSE;
    }
    PyObject *name, *target;
    Py_ssize_t at = 0;
    while (PyDict_Next(targets, &at, &name, &target)) {
        PyObject *value = PyDict_GetItemWithError(values, name);
        if (value == NULL && PyErr_Occurred()) {
            return NULL;
        }
        if (value == NULL || !copied(target, value)) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyObject *put(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 3)) {
        return NULL;
    }
    PyArrayObject *row = as_target(arguments[0]);
    Py_ssize_t b = PyLong_AsSsize_t(arguments[1]);
    if (b == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int is_there = row != NULL && PyArray_NDIM(row) > 0 && 0 <= b && b < PyArray_DIM(row, 0);
    return PyBool_FromLong(is_there && is_in_row(row, b, arguments[2]));
}

/* The row and its list of values, one for each entry; 0 if they are something else. */
static int is_row_with_list(PyArrayObject *row, PyObject *values) {
    return row != NULL && PyArray_NDIM(row) > 0 && PyList_CheckExact(values) &&
           PyList_GET_SIZE(values) == PyArray_DIM(row, 0);
}

static PyObject *gather(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 2)) {
        return NULL;
    }
    PyArrayObject *row = as_target(arguments[0]);
    PyObject *values = arguments[1];
    if (!is_row_with_list(row, values)) {
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t b = 0; b < PyList_GET_SIZE(values); b++) {
        if (!is_in_row(row, b, PyList_GET_ITEM(values, b))) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

/* Python's number `object`; 0 if it is none. */
static int as_number(PyObject *object, double *number) {
    if (PyFloat_Check(object)) { /* numpy's float64 is one too */
        *number = PyFloat_AS_DOUBLE(object);
        return 1;
    }
    if (!PyLong_CheckExact(object)) {
        return 0;
    }
    *number = PyLong_AsDouble(object);
    if (*number == -1.0 && PyErr_Occurred()) { /* too large */
        PyErr_Clear();
        return 0;
    }
    return 1;
}

static PyObject *gather_numbers(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 2)) {
        return NULL;
    }
    PyArrayObject *row = as_target(arguments[0]);
    PyObject *values = arguments[1];
    if (!is_row_with_list(row, values) || PyArray_NDIM(row) != 1 || PyArray_TYPE(row) != NPY_FLOAT32) {
        Py_RETURN_FALSE;
    }
    npy_float32 *at = PyArray_DATA(row);
    for (Py_ssize_t b = 0; b < PyList_GET_SIZE(values); b++) {
        double number;
        if (!as_number(PyList_GET_ITEM(values, b), &number)) {
            Py_RETURN_FALSE;
        }
        at[b] = (npy_float32)number;
        if (isinf(at[b]) && !isinf(number)) {
            Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

/* ---- trajectories ------------------------------------------------------------------------------ */

enum { LENGTH, RETURN, NONZERO_REWARDS, DISCOUNTED_RETURN, N_FIGURES }; /* the rows of `running` */

/* A row of `records`: RECORD of trajectory_queue.py. */
typedef struct {
    npy_int64 t, env_rank, length;
    double return_;
    npy_int64 nonzero_rewards;
    double discounted_return;
} Record;

/* `object` as an array of `type` with `n` dimensions, however it lies in memory; else NULL. */
static PyArrayObject *as_array(PyObject *object, int type, int n) {
    if (!PyArray_CheckExact(object)) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_TYPE(array) == type && PyArray_NDIM(array) == n && PyArray_ISBEHAVED_RO(array) ? array : NULL;
}

static PyObject *sum_episodes(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 7)) {
        return NULL;
    }
    PyArrayObject *reward = as_array(arguments[0], NPY_FLOAT32, 2), *done = as_array(arguments[1], NPY_BOOL, 2);
    PyArrayObject *running = as_target(arguments[2]), *records = as_target(arguments[3]);
    long long first_t = PyLong_AsLongLong(arguments[4]), first_env_rank = PyLong_AsLongLong(arguments[5]);
    double discount = PyFloat_AsDouble(arguments[6]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (reward == NULL || done == NULL || running == NULL || records == NULL) {
        return PyLong_FromLong(-1);
    }
    npy_intp n_rows = PyArray_DIM(reward, 0), n_columns = PyArray_DIM(reward, 1);
    int fits = PyArray_DIM(done, 0) == n_rows && PyArray_DIM(done, 1) == n_columns &&
               PyArray_TYPE(running) == NPY_FLOAT64 && PyArray_SIZE(running) == N_FIGURES * n_columns &&
               PyArray_TYPE(records) == NPY_UINT8 && PyArray_SIZE(records) >= PyArray_SIZE(reward) * (npy_intp)sizeof(Record);
    if (!fits || (npy_uintp)PyArray_DATA(records) % sizeof(double)) {
        return PyLong_FromLong(-1);
    }
    Record *record = PyArray_DATA(records);
    double *sums = PyArray_DATA(running);
    for (npy_intp b = 0; b < n_columns; b++) {
        double length = sums[LENGTH * n_columns + b], return_ = sums[RETURN * n_columns + b];
        double nonzero = sums[NONZERO_REWARDS * n_columns + b], discounted = sums[DISCOUNTED_RETURN * n_columns + b];
        double weight = pow(discount, length);
        for (npy_intp t = 0; t < n_rows; t++) {
            double number = *(npy_float32 *)PyArray_GETPTR2(reward, t, b);
            length += 1;
            return_ += number;
            nonzero += number != 0;
            discounted += weight * number;
            weight *= discount;
            if (*(npy_bool *)PyArray_GETPTR2(done, t, b)) {
                *record++ = (Record){first_t + t, first_env_rank + b, (npy_int64)length, return_, (npy_int64)nonzero, discounted};
                length = return_ = nonzero = discounted = 0;
                weight = 1;
            }
        }
        sums[LENGTH * n_columns + b] = length, sums[RETURN * n_columns + b] = return_;
        sums[NONZERO_REWARDS * n_columns + b] = nonzero, sums[DISCOUNTED_RETURN * n_columns + b] = discounted;
    }
    return PyLong_FromSsize_t(record - (Record *)PyArray_DATA(records));
}

/* ---- the module -------------------------------------------------------------------------------- */

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(copy), FUNCTION(copy_fields), FUNCTION(put), FUNCTION(gather), FUNCTION(gather_numbers),
    FUNCTION(sum_episodes),
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *Py_UNUSED(module)) {
    import_array1(-1);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = functions, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
