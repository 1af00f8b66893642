/* Chooses the actions of one time step from logits: bit for bit the results of the numpy calls in agents/distributions.py.
   distributions.py says what each function does. */

#include "../buffers/_native.h"

#include <math.h>

/* float32 numbers are computed in float64 and rounded after each operation: the results are those of float32. */
static double read_float(PyArrayObject *table, npy_intp i, npy_intp j) {
    const void *at = PyArray_GETPTR2(table, i, j);
    return PyArray_TYPE(table) == NPY_FLOAT64 ? *(const npy_float64 *)at : *(const npy_float32 *)at;
}

/* Write `number`; returns it rounded to the type of `array`. */
static double write_float(PyArrayObject *array, void *at, double number) {
    return PyArray_TYPE(array) == NPY_FLOAT64 ? (*(npy_float64 *)at = number)
                                              : (*(npy_float32 *)at = (npy_float32)number);
}

/* `object` if it is a table of float32 or float64 with at least one column, else NULL. */
static PyArrayObject *as_floats(PyObject *object) {
    PyArrayObject *table = PyArray_CheckExact(object) ? (PyArrayObject *)object : NULL;
    if (table == NULL || PyArray_NDIM(table) != 2 || PyArray_DIM(table, 1) == 0 || !PyArray_ISBEHAVED_RO(table)) {
        return NULL;
    }
    return PyArray_TYPE(table) == NPY_FLOAT32 || PyArray_TYPE(table) == NPY_FLOAT64 ? table : NULL;
}

/* shift_rows(logits) */
static PyObject *shift_rows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!check_arguments(n, 1)) {
        return NULL;
    }
    PyArrayObject *logits = as_floats(arguments[0]);
    if (logits == NULL) {
        Py_RETURN_NONE;
    }
    PyArrayObject *shifted = (PyArrayObject *)PyArray_SimpleNew(2, PyArray_SHAPE(logits), PyArray_TYPE(logits));
    for (npy_intp i = 0; shifted != NULL && i < PyArray_DIM(logits, 0); i++) {
        double largest = read_float(logits, i, 0);
        int is_valid = !isnan(largest);
        for (npy_intp j = 1; j < PyArray_DIM(logits, 1); j++) {
            double number = read_float(logits, i, j);
            is_valid = is_valid && !isnan(number);
            largest = number > largest ? number : largest;
        }
        if (!is_valid || isinf(largest)) {
            Py_DECREF(shifted);
            Py_RETURN_NONE;
        }
        for (npy_intp j = 0; j < PyArray_DIM(logits, 1); j++) {
            write_float(shifted, PyArray_GETPTR2(shifted, i, j), read_float(logits, i, j) - largest);
        }
    }
    return (PyObject *)shifted;
}

/* draw_rows(weights, uniform, shifted) */
static PyObject *draw_rows(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!check_arguments(n, 3)) {
        return NULL;
    }
    PyArrayObject *weights = as_floats(arguments[0]), *shifted = as_floats(arguments[2]);
    int is_greedy = arguments[1] == Py_None;
    PyArrayObject *uniform = PyArray_CheckExact(arguments[1]) ? (PyArrayObject *)arguments[1] : NULL;
    if (weights == NULL || shifted == NULL || PyArray_TYPE(weights) != PyArray_TYPE(shifted) ||
        !PyArray_SAMESHAPE(weights, shifted) || !PyArray_ISWRITEABLE(weights)) {
        Py_RETURN_NONE;
    }
    if (!is_greedy && (uniform == NULL || PyArray_TYPE(uniform) != NPY_FLOAT64 || PyArray_NDIM(uniform) != 1 ||
                       PyArray_DIM(uniform, 0) != PyArray_DIM(weights, 0) || !PyArray_ISBEHAVED_RO(uniform))) {
        Py_RETURN_NONE;
    }
    npy_intp n_rows = PyArray_DIM(weights, 0), n_columns = PyArray_DIM(weights, 1);
    PyArrayObject *index = (PyArrayObject *)PyArray_SimpleNew(1, &n_rows, NPY_INT64);
    PyArrayObject *chosen = (PyArrayObject *)PyArray_SimpleNew(1, &n_rows, PyArray_TYPE(shifted));
    int is_drawn = index != NULL && chosen != NULL;
    for (npy_intp i = 0; is_drawn && i < n_rows; i++) {
        double sum = read_float(weights, i, 0);
        for (npy_intp j = 1; j < n_columns; j++) {
            sum = write_float(weights, PyArray_GETPTR2(weights, i, j), sum + read_float(weights, i, j));
        }
        npy_int64 found = 0;
        if (is_greedy) {
            while (found < n_columns && read_float(shifted, i, found) != 0) {
                found++; /* the largest is 0 */
            }
        } else {
            double bound = *(const npy_float64 *)PyArray_GETPTR1(uniform, i) * sum;
            for (npy_intp j = 0; j < n_columns; j++) {
                found += read_float(weights, i, j) <= bound;
            }
        }
        *(npy_int64 *)PyArray_GETPTR1(index, i) = found;
        is_drawn = found < n_columns;
        if (is_drawn) {
            write_float(chosen, PyArray_GETPTR1(chosen, i), read_float(shifted, i, found));
        }
    }
    PyObject *result = is_drawn ? PyTuple_Pack(2, index, chosen) : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    Py_XDECREF(index);
    Py_XDECREF(chosen);
    return result;
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {FUNCTION(shift_rows), FUNCTION(draw_rows), {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_drawing", .m_size = -1, .m_methods = functions,
};

/* One phase, for the reason that buffers/_native.c gives. */
PyMODINIT_FUNC PyInit__drawing(void) {
    import_array();
    return PyModule_Create(&definition);
}
