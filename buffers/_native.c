/* How a batch is written and summed up, in C: see native.py, which says what each function does.

   numpy looks up types and shapes at every call. For a row of a few dozen numbers the look-up takes longer than the
   copy. Here one comparison shows that a value has the expected type and shape, and its bytes are copied. Only Python's
   numbers, and float64 for float32, are converted. Other values raise nothing: the caller handles them in Python. */

#include "_native.h"

#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#ifdef __linux__
#include <sys/prctl.h>
#include <unistd.h>
#endif

/* The answer of a function: `result` is 1, 0, or -1 with an exception set. */
static PyObject *as_bool(int result) { return result < 0 ? NULL : PyBool_FromLong(result); }

/* Contiguous, writable memory for `n` dimensions of numbers or bools. */
typedef struct {
    char *data;
    const npy_intp *shape;
    int n, type;
    npy_intp nbytes;
} Block;

/* Row t of array `object` `[T, ...]`. Each row must be contiguous; the rows may have gaps between them. */
static int find_row(PyObject *object, Py_ssize_t t, Block *row) {
    if (!PyArray_CheckExact(object)) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int n = PyArray_NDIM(array), type = PyArray_TYPE(array);
    /* To copy an element of these types it is enough to copy its bytes. */
    int is_plain = (type >= 0 && PyTypeNum_ISNUMBER(type)) || type == NPY_BOOL || type == NPY_HALF;
    if (n == 0 || t < 0 || t >= PyArray_DIM(array, 0) || !PyArray_ISBEHAVED(array) || !is_plain) {
        return 0;
    }
    npy_intp nbytes = PyArray_ITEMSIZE(array);
    for (int i = n - 1; i > 0; i--) {
        if (PyArray_STRIDE(array, i) != nbytes) {
            return 0;
        }
        nbytes *= PyArray_DIM(array, i);
    }
    *row = (Block){PyArray_BYTES(array) + t * PyArray_STRIDE(array, 0), PyArray_SHAPE(array) + 1, n - 1, type, nbytes};
    return 1;
}

/* Write `n` numbers into `block` as float32. Returns 0 if the block has another type, or if one is too large. */
static int write_float32(const Block *block, const double *numbers, npy_intp n) {
    int fits = block->type == NPY_FLOAT32;
    for (npy_intp i = 0; i < n && fits; i++) {
        npy_float32 rounded = (npy_float32)numbers[i];
        fits = !isinf(rounded) || isinf(numbers[i]);
        ((npy_float32 *)block->data)[i] = rounded;
    }
    return fits;
}

/* Write `object` into `block` if it is a contiguous array of the same shape and type, or float64 for float32. Returns
   whether it was written. */
static int write_array(const Block *block, PyObject *object) {
    PyArrayObject *value = PyArray_CheckExact(object) ? (PyArrayObject *)object : NULL;
    if (value == NULL || PyArray_NDIM(value) != block->n || !PyArray_ISCARRAY_RO(value) ||
        (block->n > 0 && memcmp(PyArray_SHAPE(value), block->shape, block->n * sizeof(npy_intp)) != 0)) {
        return 0;
    }
    if (PyArray_TYPE(value) == block->type) {
        if (PyArray_DATA(value) != block->data) { /* equal if `step_into` has written the value in its place */
            memmove(block->data, PyArray_DATA(value), block->nbytes);
        }
        return 1;
    }
    return PyArray_TYPE(value) == NPY_FLOAT64 && write_float32(block, PyArray_DATA(value), PyArray_SIZE(value));
}

/* Write the number `object` into `block`: a Python int into int64 or float32, a Python float or numpy's float64 into
   float64 or float32, or one of numpy's numbers into the same type. Returns whether it was written. */
static int write_number(const Block *block, PyObject *object) {
    if (PyFloat_CheckExact(object) || Py_TYPE(object) == &PyDoubleArrType_Type) { /* both are laid out in the same way */
        const double *number = &((PyFloatObject *)object)->ob_fval;
        if (block->type == NPY_FLOAT64) {
            *(npy_float64 *)block->data = *number;
            return 1;
        }
        return write_float32(block, number, 1);
    }
    if (PyLong_CheckExact(object)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (!overflow && block->type == NPY_INT64) {
            *(npy_int64 *)block->data = number;
            return 1;
        }
        double exact = (double)number;
        return !overflow && -(1LL << 53) <= number && number <= 1LL << 53 && write_float32(block, &exact, 1);
    }
    PyArray_Descr *dtype = PyArray_IsScalar(object, Generic) ? PyArray_DescrFromScalar(object) : NULL;
    int type = dtype == NULL ? -1 : dtype->type_num;
    Py_XDECREF(dtype);
    PyErr_Clear();
    if (type == block->type) {
        PyArray_ScalarAsCtype(object, block->data);
    }
    return type == block->type;
}

/* ---- elements of spaces ------------------------------------------------------------------------ */

/* Where values go. EACH: value i into entry i of row t. ENTRY: one value into entry b of row t. WHOLE: one value is
   row t. */
typedef struct {
    enum { EACH, ENTRY, WHOLE } what;
    Py_ssize_t t, b;
} Target;

/* Write `n` values into `object`, an array. Returns whether all were written. */
static int fill_array(PyObject *object, Target target, PyObject *const *values, Py_ssize_t n) {
    Block row;
    if (!find_row(object, target.t, &row)) {
        return 0;
    }
    if (target.what == WHOLE) {
        return write_array(&row, values[0]);
    }
    if (row.n == 0 || (target.what == EACH ? row.shape[0] != n : row.shape[0] <= target.b)) {
        return 0;
    }
    npy_intp nbytes = row.nbytes / row.shape[0]; /* of an entry */
    Block entry = {row.data + target.b * nbytes, row.shape + 1, row.n - 1, row.type, nbytes};
    int is_written = 1;
    for (Py_ssize_t i = 0; i < n && is_written; i++, entry.data += nbytes) {
        is_written = write_array(&entry, values[i]) || (entry.n == 0 && write_number(&entry, values[i]));
    }
    return is_written;
}

/* Write `n` values into `arrays`: an array, or a dict or tuple of such, nested as the values are. Returns 1 if all was
   written, 0 if something does not fit, -1 with an exception set. */
static int fill(PyObject *arrays, Target target, PyObject *const *values, Py_ssize_t n);

/* `fill` with one part of every value: the part `name`, or part i if `name` is NULL. The parts are kept in `parts` with
   their own references, since a comparison of names may run the user's code. */
static int fill_parts(PyObject *array, Target target, PyObject *const *values, Py_ssize_t n, PyObject *name, Py_ssize_t i,
                      PyObject **parts) {
    Py_ssize_t held = 0;
    for (PyObject *part; held < n; parts[held++] = Py_NewRef(part)) {
        part = name == NULL ? PyTuple_GET_ITEM(values[held], i) : PyDict_GetItemWithError(values[held], name);
        if (part == NULL) {
            break;
        }
    }
    int result = held == n ? fill(array, target, parts, n) : PyErr_Occurred() ? -1 : 0;
    while (held > 0) {
        Py_DECREF(parts[--held]);
    }
    return result;
}

/* Whether `value` is a tuple or dict as `arrays` is, of the same size. Subclasses may return other items than they
   store. So OrderedDict is the only one that is accepted. */
static int has_structure_of(PyObject *value, PyObject *arrays) {
    if (PyTuple_CheckExact(arrays)) {
        return PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) == PyTuple_GET_SIZE(arrays);
    }
    return (PyDict_CheckExact(value) || PyODict_CheckExact(value)) && PyDict_GET_SIZE(value) == PyDict_GET_SIZE(arrays);
}

static int fill(PyObject *arrays, Target target, PyObject *const *values, Py_ssize_t n) {
    int is_tuple = PyTuple_CheckExact(arrays), result = 1;
    if (!is_tuple && !PyDict_CheckExact(arrays)) {
        return fill_array(arrays, target, values, n);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!has_structure_of(values[i], arrays)) {
            return 0;
        }
    }
    PyObject **parts = PyMem_New(PyObject *, n), *name = NULL, *array = NULL;
    if (parts == NULL || Py_EnterRecursiveCall(" while nested values are written")) {
        PyMem_Free(parts);
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    }
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; result == 1; i++) {
        if (is_tuple ? i == PyTuple_GET_SIZE(arrays) : !PyDict_Next(arrays, &at, &name, &array)) {
            break;
        }
        array = Py_NewRef(is_tuple ? PyTuple_GET_ITEM(arrays, i) : array);
        Py_XINCREF(name);
        result = fill_parts(array, target, values, n, name, i, parts);
        Py_XDECREF(name);
        Py_DECREF(array);
    }
    Py_LeaveRecursiveCall();
    PyMem_Free(parts);
    return result;
}

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

#ifdef __linux__
/* The kernel signals only this process when its parent exits. So this handler kills the process group. */
static void kill_group(int Py_UNUSED(number)) { kill(getpgrp() == getpid() ? 0 : getpid(), SIGKILL); }
#endif

static PyObject *end_group_with_parent(PyObject *Py_UNUSED(module), Arguments Py_UNUSED(arguments), Py_ssize_t n) {
    if (!check_arguments(n, 0)) {
        return NULL;
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
