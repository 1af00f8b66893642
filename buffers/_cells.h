/* How values are written into cells of a batch: what put_row and put_cell in buffers/native.py say.

   numpy looks up types and shapes at every call. For a row of a few dozen numbers the look-up takes longer than the
   copy. Here one comparison shows that a value has the expected type and shape, and its bytes are copied. Only Python's
   numbers, and float64 for float32, are converted. Other values raise nothing: the caller handles them in Python. */

#ifndef PENSTOCK_BUFFERS_CELLS_H
#define PENSTOCK_BUFFERS_CELLS_H

#include "_native.h"

#include <math.h>
#include <string.h>

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

#endif
