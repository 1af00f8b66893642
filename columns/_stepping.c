/* One time step of all environments of a worker, and the result of a game's: see stepping.py. */

#include "../buffers/_native.h"

#include <numpy/arrayscalars.h>

#include <stdint.h>
#include <string.h>

/* The arguments of step_ordinary. `outs` and `ends` may be None. */
typedef struct {
    PyObject *bound, *actions, *outs, *observations, *rewards, *ends;
    int64_t *words;
    Py_ssize_t n_words, watch;
} Row;

/* Values of `watch`; the same as in stepping.py. */
enum { WATCH_ALL = 1, WATCH_UNUSUAL = 2 };

/* One environment's step: its column, the array that step_into writes (NULL with step), and the result. */
typedef struct {
    Py_ssize_t column;
    PyObject *out, *result;
} Step;

/* Call `env.step(action)` or `env.step_into(out, action)` of `entry`, (column, env_rank, env.step, env.step_into).
   Returns 0 with an exception set if that raises. */
static int call_step(const Row *row, PyObject *entry, PyObject *action, Step *step) {
    Py_ssize_t env_rank;
    if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 4) {
        PyErr_Format(PyExc_TypeError, "bound must be a list of (column, env_rank, env.step, env.step_into)");
        return 0;
    }
    if (!read_index(PyTuple_GET_ITEM(entry, 0), &step->column) || !read_index(PyTuple_GET_ITEM(entry, 1), &env_rank)) {
        return 0;
    }
    row->words[row->n_words - 1] = env_rank;
    PyObject *step_into = PyTuple_GET_ITEM(entry, 3);
    if (row->outs == Py_None || step_into == Py_None) {
        PyObject *arguments[] = {NULL, action};
        size_t n = 1 | PY_VECTORCALL_ARGUMENTS_OFFSET;
        step->result = PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 2), arguments + 1, n, NULL);
        return step->result != NULL;
    }
    if (step->column < 0 || step->column >= PyList_GET_SIZE(row->outs)) {
        PyErr_Format(PyExc_IndexError, "outs has no entry for column %zd", step->column);
        return 0;
    }
    step->out = Py_NewRef(PyList_GET_ITEM(row->outs, step->column));
    PyObject *arguments[] = {NULL, step->out, action};
    step->result = PyObject_Vectorcall(step_into, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    return step->result != NULL;
}

/* Store the result of an ordinary step. Returns 1, or 0 if the step is not ordinary, or -1 with an exception set. */
static int store(const Row *row, const Step *step) {
    PyObject *result = step->result;
    Py_ssize_t at = step->out == NULL; /* where the reward is: step_into returns no observation */
    if (row->watch == WATCH_ALL || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != at + 4) {
        return 0;
    }
    PyObject *reward = PyTuple_GET_ITEM(result, at), *terminated = PyTuple_GET_ITEM(result, at + 1);
    PyObject *truncated = PyTuple_GET_ITEM(result, at + 2), *observation = at ? PyTuple_GET_ITEM(result, 0) : step->out;
    PyObject *info = PyTuple_GET_ITEM(result, at + 3);
    if (!PyBool_Check(terminated) || !PyBool_Check(truncated) || !PyDict_CheckExact(info)) {
        return 0;
    }
    if (row->watch == WATCH_UNUSUAL && (PyDict_GET_SIZE(info) != 0 || !PyFloat_CheckExact(reward))) {
        return 0;
    }
    if (terminated != Py_False || truncated != Py_False) {
        if (row->ends == Py_None || !PyFloat_CheckExact(reward)) {
            return 0;
        }
        PyObject *end = Py_BuildValue("nOOOO", step->column, observation, reward, terminated, truncated);
        int is_noted = end != NULL && PyList_Append(row->ends, end) == 0;
        Py_XDECREF(end);
        if (!is_noted) {
            return -1;
        }
    }
    int is_stored = PyList_SetItem(row->observations, step->column, Py_NewRef(observation)) == 0 &&
                    PyList_SetItem(row->rewards, step->column, Py_NewRef(reward)) == 0;
    return is_stored ? 1 : -1;
}

/* Step the environments from `first` on. Returns None, or (index, result) of the first step that is not ordinary. */
static PyObject *step_all(const Row *row, Py_ssize_t first) {
    Py_ssize_t n = PyList_GET_SIZE(row->bound);
    for (Py_ssize_t i = first; i < n; i++) {
        if (i >= PyList_GET_SIZE(row->bound) || i >= PyList_GET_SIZE(row->actions)) {
            return PyErr_Format(PyExc_IndexError, "bound or actions became shorter during a step");
        }
        /* New references, because the step may remove them from the lists. */
        PyObject *entry = Py_NewRef(PyList_GET_ITEM(row->bound, i)), *action = Py_NewRef(PyList_GET_ITEM(row->actions, i));
        Step step = {0, NULL, NULL};
        int result = call_step(row, entry, action, &step) ? store(row, &step) : -1;
        Py_DECREF(action);
        Py_DECREF(entry);
        Py_XDECREF(step.out);
        if (result == 0) {
            return Py_BuildValue("nN", i, step.result);
        }
        Py_XDECREF(step.result);
        /* A step in C does not handle signals, so do it here. */
        if (result < 0 || PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

/* Check the arguments, then step the environments. */
static PyObject *step_row(Row *row, Py_ssize_t first) {
    if (!PyList_Check(row->bound) || !PyList_Check(row->actions) || !PyList_Check(row->observations) ||
        !PyList_Check(row->rewards) || !(row->outs == Py_None || PyList_Check(row->outs)) ||
        !(row->ends == Py_None || PyList_Check(row->ends))) {
        return PyErr_Format(PyExc_TypeError, "bound, actions, outs, observations, rewards and ends must be lists");
    }
    Py_ssize_t n_actions = PyList_GET_SIZE(row->actions), n_bound = PyList_GET_SIZE(row->bound);
    if (n_actions != n_bound) {
        return PyErr_Format(PyExc_ValueError, "expected %zd actions, got %zd", n_bound, n_actions);
    }
    if (first < 0) {
        return PyErr_Format(PyExc_IndexError, "there is no environment %zd", first);
    }
    return step_all(row, first);
}

static PyObject *step_ordinary(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first;
    if (n != 9) {
        return PyErr_Format(PyExc_TypeError, "expected 9 arguments, got %zd", n);
    }
    Row row = {.bound = arguments[1], .actions = arguments[2], .outs = arguments[3], .observations = arguments[6],
               .rewards = arguments[7], .ends = arguments[8]};
    if (!read_index(arguments[4], &first) || !read_index(arguments[5], &row.watch)) {
        return NULL;
    }
    Py_buffer words;
    if (PyObject_GetBuffer(arguments[0], &words, PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    int is_int64 = words.itemsize == 8 && (strcmp(words.format, "l") == 0 || strcmp(words.format, "q") == 0);
    if (words.ndim == 1 && words.shape[0] > 0 && is_int64) {
        row.words = words.buf, row.n_words = words.shape[0];
        result = step_row(&row, first);
    } else {
        PyErr_Format(PyExc_TypeError, "words must be an array of int64 numbers");
    }
    PyBuffer_Release(&words);
    return result;
}

/* ---- games ------------------------------------------------------------------------------------- */

/* Whether both are texts, and equal. */
static int is_text(PyObject *one, PyObject *other) {
    return PyUnicode_CheckExact(one) && PyUnicode_CheckExact(other) && PyUnicode_Compare(one, other) == 0;
}

/* Whether the keys of the dict `found`, or the items of the list, are `agents`, in this order: the same objects, or
   equal texts. */
static int has_agents(PyObject *found, PyObject *agents) {
    PyObject *key, *value;
    Py_ssize_t position = 0, n = PyList_GET_SIZE(agents);
    int is_list = PyList_CheckExact(found);
    if ((is_list ? PyList_GET_SIZE(found) : PyDict_GET_SIZE(found)) != n) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (is_list) {
            key = PyList_GET_ITEM(found, i);
        } else {
            PyDict_Next(found, &position, &key, &value);
        }
        if (key != PyList_GET_ITEM(agents, i) && !is_text(key, PyList_GET_ITEM(agents, i))) {
            return 0;
        }
    }
    return 1;
}

/* Whether `dict` has `n` flags, and each is False of Python or numpy. */
static int are_false(PyObject *dict, Py_ssize_t n) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (value != Py_False && value != PyArrayScalar_False) {
            return 0;
        }
    }
    return PyDict_GET_SIZE(dict) == n;
}

/* Put the values of `dict` into `list` from index `first` on. */
static void put_values(PyObject *list, Py_ssize_t first, PyObject *dict) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        PyObject *old = PyList_GET_ITEM(list, first);
        PyList_SET_ITEM(list, first++, Py_NewRef(value));
        Py_DECREF(old);
    }
}

static PyObject *store_game_step(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first;
    if (n != 6) {
        return PyErr_Format(PyExc_TypeError, "expected 6 arguments, got %zd", n);
    }
    PyObject *result = arguments[0], *living = arguments[1], *listed = arguments[2], *lists[] = {arguments[3], arguments[4]};
    if (!PyList_CheckExact(living) || !PyList_CheckExact(lists[0]) || !PyList_CheckExact(lists[1])) {
        return PyErr_Format(PyExc_TypeError, "living, observations and rewards must be lists");
    }
    if (!read_index(arguments[5], &first)) {
        return NULL;
    }
    int is_ordinary = PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 5 && PyList_CheckExact(listed);
    for (Py_ssize_t i = 0; is_ordinary && i < 5; i++) {
        is_ordinary = PyDict_Check(PyTuple_GET_ITEM(result, i)); /* also a defaultdict */
    }
    Py_ssize_t n_agents = PyList_GET_SIZE(living);
    if (!is_ordinary || !has_agents(listed, living) || !has_agents(PyTuple_GET_ITEM(result, 0), living) ||
        !has_agents(PyTuple_GET_ITEM(result, 1), living) || !are_false(PyTuple_GET_ITEM(result, 2), n_agents) ||
        !are_false(PyTuple_GET_ITEM(result, 3), n_agents)) {
        Py_RETURN_FALSE;
    }
    for (int i = 0; first >= 0 && i < 2; i++) {
        if (first + n_agents > PyList_GET_SIZE(lists[i])) {
            return PyErr_Format(PyExc_IndexError, "there are no columns for %zd agents from %zd on", n_agents, first);
        }
        put_values(lists[i], first, PyTuple_GET_ITEM(result, i));
    }
    Py_RETURN_TRUE;
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {FUNCTION(step_ordinary), FUNCTION(store_game_step), {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_stepping", .m_size = -1, .m_methods = functions,
};

/* One phase, for the reason that buffers/_native.c gives. */
PyMODINIT_FUNC PyInit__stepping(void) {
    import_array();
    return PyModule_Create(&definition);
}
