/* What a collector does in every row of a batch, for the usual kinds of data; see native.py.

   numpy has to find out anew with every call what is to be done, which takes longer than doing it where a row has a few
   dozen numbers, the more so as the code for it has been forgotten by the processor since the row before. Here one
   comparison says whether there is nothing to find out. Nothing is ever cast but Python's numbers to float32, and what is
   not as it should be raises nothing: it is left to numpy, and to those who can say what is wrong with it. */

#include "_native.h"

#include <math.h>
#include <string.h>

/* ---- arrays ------------------------------------------------------------------------------------ */

/* Whether elements of this type are their bytes: no references, no dates with units, no records. */
static int is_plain(int type) {
    return (type >= 0 && PyTypeNum_ISNUMBER(type)) || type == NPY_BOOL || type == NPY_HALF;
}

/* A place that can be written into: `n` dimensions of plain elements, one behind the other. */
typedef struct {
    char *data;
    const npy_intp *shape;
    int n, type;
    npy_intp nbytes;
} Place;

/* All of array `object`; 0 if it is something else, or not in one piece. */
static int find_place(PyObject *object, Place *place) {
    if (!PyArray_CheckExact(object)) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_ISCARRAY(array) || !is_plain(PyArray_TYPE(array))) {
        return 0;
    }
    *place = (Place){PyArray_BYTES(array), PyArray_SHAPE(array), PyArray_NDIM(array), PyArray_TYPE(array),
                     PyArray_NBYTES(array)};
    return 1;
}

/* Row t of array `object` `[T, ...]`, whose rows need not be one behind the other. */
static int find_row(PyObject *object, Py_ssize_t t, Place *row) {
    if (!PyArray_CheckExact(object)) {
        return 0;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int n = PyArray_NDIM(array);
    if (n == 0 || t < 0 || t >= PyArray_DIM(array, 0) || !PyArray_ISBEHAVED(array) || !is_plain(PyArray_TYPE(array))) {
        return 0;
    }
    npy_intp nbytes = PyArray_ITEMSIZE(array);
    for (int i = n - 1; i > 0; i--) {
        if (PyArray_STRIDE(array, i) != nbytes) {
            return 0;
        }
        nbytes *= PyArray_DIM(array, i);
    }
    *row = (Place){PyArray_BYTES(array) + t * PyArray_STRIDE(array, 0), PyArray_SHAPE(array) + 1, n - 1,
                   PyArray_TYPE(array), nbytes};
    return 1;
}

/* Entry b of `row` `[B, ...]`; the place must have one. */
static Place entry_of(const Place *row, Py_ssize_t b) {
    npy_intp nbytes = row->nbytes / row->shape[0];
    return (Place){row->data + b * nbytes, row->shape + 1, row->n - 1, row->type, nbytes};
}

static int has_entry(const Place *row, Py_ssize_t b) { return row->n > 0 && 0 <= b && b < row->shape[0]; }

/* Write `object` there if it is an array of the same type and shape, in one piece; returns whether it was. */
static int wrote(const Place *place, PyObject *object) {
    if (!PyArray_CheckExact(object)) {
        return 0;
    }
    PyArrayObject *value = (PyArrayObject *)object;
    if (PyArray_TYPE(value) != place->type || PyArray_NDIM(value) != place->n || !PyArray_ISCARRAY_RO(value) ||
        (place->n > 0 && memcmp(PyArray_SHAPE(value), place->shape, place->n * sizeof(npy_intp)) != 0)) {
        return 0;
    }
    memmove(place->data, PyArray_DATA(value), place->nbytes);
    return 1;
}

/* ---- copies ------------------------------------------------------------------------------------ */

static PyObject *copy(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 2)) {
        return NULL;
    }
    Place target;
    return PyBool_FromLong(find_place(arguments[0], &target) && wrote(&target, arguments[1]));
}

static PyObject *copy_row(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t t;
    if (!has_arguments(n, 3) || !has_index(arguments[1], &t)) {
        return NULL;
    }
    Place row;
    return PyBool_FromLong(find_row(arguments[0], t, &row) && wrote(&row, arguments[2]));
}

static PyObject *copy_fields(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t t;
    if (!has_arguments(n, 3) || !has_index(arguments[1], &t)) {
        return NULL;
    }
    PyObject *arrays = arguments[0], *values = arguments[2];
    if (!PyDict_CheckExact(arrays) || !PyDict_CheckExact(values) || PyDict_GET_SIZE(arrays) != PyDict_GET_SIZE(values)) {
        Py_RETURN_FALSE;
    }
    PyObject *name, *array;
    Py_ssize_t at = 0;
    while (PyDict_Next(arrays, &at, &name, &array)) {
        PyObject *value = PyDict_GetItemWithError(values, name);
        if (value == NULL && PyErr_Occurred()) {
            return NULL;
        }
        Place row;
        if (value == NULL || !find_row(array, t, &row) || !wrote(&row, value)) {
            Py_RETURN_FALSE; /* nothing of Python's runs between finding the value and this */
        }
    }
    Py_RETURN_TRUE;
}

/* Write the number `object` there if it is one of numpy's of that type, or a Python int that int64 can hold. */
static int wrote_number(const Place *place, PyObject *object) {
    if (PyLong_CheckExact(object)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (overflow || place->type != NPY_INT64) {
            return 0;
        }
        *(npy_int64 *)place->data = number;
        return 1;
    }
    if (!PyArray_IsScalar(object, Generic)) {
        return 0;
    }
    PyArray_Descr *dtype = PyArray_DescrFromScalar(object);
    if (dtype == NULL) {
        PyErr_Clear();
        return 0;
    }
    int fits = dtype->type_num == place->type;
    if (fits) {
        PyArray_ScalarAsCtype(object, place->data);
    }
    Py_DECREF(dtype);
    return fits;
}

/* Write `value` into entry b of row t: of an array, or of every array in a dict or tuple of such, nested as `value` is.
   `n_columns` is how many entries the row must have, or ANY. Returns 0 if something does not fit, -1 with an exception
   set if that could not be found out. Of a subclass, whose items may be others than those that lie there, nothing is
   taken but of OrderedDict; what is taken is held, since comparing names may run the user's code. */
enum { ANY = -1 };

static int wrote_entry(PyObject *arrays, Py_ssize_t t, Py_ssize_t b, Py_ssize_t n_columns, PyObject *value);

static int wrote_items(PyObject *arrays, Py_ssize_t t, Py_ssize_t b, Py_ssize_t n_columns, PyObject *value) {
    if (!PyTuple_CheckExact(value) || PyTuple_GET_SIZE(value) != PyTuple_GET_SIZE(arrays)) {
        return 0;
    }
    int result = 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays) && result == 1; i++) {
        result = wrote_entry(PyTuple_GET_ITEM(arrays, i), t, b, n_columns, PyTuple_GET_ITEM(value, i));
    }
    return result;
}

static int wrote_named(PyObject *arrays, Py_ssize_t t, Py_ssize_t b, Py_ssize_t n_columns, PyObject *value) {
    if (!(PyDict_CheckExact(value) || PyODict_CheckExact(value)) || PyDict_GET_SIZE(value) != PyDict_GET_SIZE(arrays)) {
        return 0;
    }
    PyObject *name, *part;
    Py_ssize_t at = 0;
    int result = 1;
    while (result == 1 && PyDict_Next(arrays, &at, &name, &part)) {
        PyObject *own = PyDict_GetItemWithError(value, name);
        if (own == NULL) {
            return PyErr_Occurred() ? -1 : 0;
        }
        Py_INCREF(own);
        result = wrote_entry(part, t, b, n_columns, own);
        Py_DECREF(own);
    }
    return result;
}

static int wrote_entry(PyObject *arrays, Py_ssize_t t, Py_ssize_t b, Py_ssize_t n_columns, PyObject *value) {
    if (PyTuple_CheckExact(arrays) || PyDict_CheckExact(arrays)) {
        if (Py_EnterRecursiveCall(" while a nested value is written")) {
            return -1;
        }
        int result = PyTuple_CheckExact(arrays) ? wrote_items(arrays, t, b, n_columns, value)
                                                : wrote_named(arrays, t, b, n_columns, value);
        Py_LeaveRecursiveCall();
        return result;
    }
    Place row;
    if (!find_row(arrays, t, &row) || !has_entry(&row, b) || (n_columns != ANY && row.shape[0] != n_columns)) {
        return 0;
    }
    Place entry = entry_of(&row, b);
    return wrote(&entry, value) || (entry.n == 0 && wrote_number(&entry, value));
}

static PyObject *gather(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t t;
    if (!has_arguments(n, 3) || !has_index(arguments[1], &t)) {
        return NULL;
    }
    PyObject *values = arguments[2];
    int result = PyList_CheckExact(values);
    Py_ssize_t n_columns = result ? PyList_GET_SIZE(values) : 0;
    for (Py_ssize_t b = 0; b < n_columns && result == 1; b++) {
        if (PyList_GET_SIZE(values) != n_columns) {
            Py_RETURN_FALSE; /* changed by the user's code that compares names */
        }
        PyObject *value = PyList_GET_ITEM(values, b);
        Py_INCREF(value);
        result = wrote_entry(arguments[0], t, b, n_columns, value);
        Py_DECREF(value);
    }
    return result < 0 ? NULL : PyBool_FromLong(result && n_columns > 0);
}

/* The cell `[t, b]` of `object`, if that is an array `[T, B]` of flags; else NULL. */
static npy_bool *flag_at(PyObject *object, Py_ssize_t t, Py_ssize_t b) {
    Place row;
    int is_flag = find_row(object, t, &row) && row.type == NPY_BOOL && row.n == 1 && has_entry(&row, b);
    return is_flag ? (npy_bool *)row.data + b : NULL;
}

static PyObject *put_end(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t t, b;
    if (!has_arguments(n, 6) || !has_index(arguments[1], &t) || !has_index(arguments[2], &b)) {
        return NULL;
    }
    PyObject *ends = arguments[0], *terminated = arguments[4], *truncated = arguments[5];
    if (!PyTuple_CheckExact(ends) || PyTuple_GET_SIZE(ends) != 4 || !PyBool_Check(terminated) || !PyBool_Check(truncated)) {
        Py_RETURN_FALSE;
    }
    npy_bool *flags[3];
    for (int i = 0; i < 3; i++) {
        flags[i] = flag_at(PyTuple_GET_ITEM(ends, i), t, b);
        if (flags[i] == NULL) {
            Py_RETURN_FALSE;
        }
    }
    int result = wrote_entry(PyTuple_GET_ITEM(ends, 3), t, b, ANY, arguments[3]);
    if (result == 1) {
        *flags[0] = NPY_TRUE, *flags[1] = terminated == Py_True, *flags[2] = truncated == Py_True;
    }
    return result < 0 ? NULL : PyBool_FromLong(result);
}

/* The number `object`, if a double holds it exactly and float32 can be rounded from that; 0 if it is something else. */
static int as_number(PyObject *object, double *number) {
    if (PyFloat_CheckExact(object) || Py_TYPE(object) == &PyDoubleArrType_Type) { /* numpy's float64 is laid out alike */
        *number = PyFloat_AS_DOUBLE(object);
        return 1;
    }
    if (!PyLong_CheckExact(object)) {
        return 0;
    }
    int overflow;
    long long integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    *number = (double)integer;
    return !overflow && -(1LL << 53) <= integer && integer <= 1LL << 53;
}

static PyObject *gather_numbers(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 2)) {
        return NULL;
    }
    PyObject *values = arguments[1];
    Place row;
    if (!find_place(arguments[0], &row) || row.n != 1 || row.type != NPY_FLOAT32 || !PyList_CheckExact(values) ||
        PyList_GET_SIZE(values) != row.shape[0]) {
        Py_RETURN_FALSE;
    }
    npy_float32 *at = (npy_float32 *)row.data;
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

/* ---- progress ---------------------------------------------------------------------------------- */

static PyObject *mark(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t i, phase, t;
    if (!has_arguments(n, 6) || !has_index(arguments[2], &i) || !has_index(arguments[3], &phase) ||
        !has_index(arguments[4], &t)) {
        return NULL;
    }
    double now = PyFloat_AsDouble(arguments[5]);
    if (now == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    Place words, stamps;
    if (!find_place(arguments[0], &words) || !find_place(arguments[1], &stamps) || words.type != NPY_INT64 ||
        words.n != 1 || words.shape[0] <= HEARTBEAT || stamps.type != NPY_FLOAT64 || stamps.n != 1 || !has_entry(&stamps, i)) {
        Py_RETURN_FALSE;
    }
    npy_int64 *row = (npy_int64 *)words.data;
    row[PHASE] = phase;
    row[ROW_T] = t;
    row[HEARTBEAT] = (npy_int64)(now * 1e9);
    ((double *)stamps.data)[i] = now;
    Py_RETURN_TRUE;
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    FUNCTION(copy),    FUNCTION(copy_row),       FUNCTION(copy_fields), FUNCTION(gather),
    FUNCTION(put_end), FUNCTION(gather_numbers), FUNCTION(mark),        {NULL, NULL, 0, NULL},
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
