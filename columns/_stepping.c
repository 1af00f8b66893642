/* One time step of all environments of a worker, and that of a game: see stepping.py. */

#include "../buffers/_cells.h"

#include <numpy/arrayscalars.h>

#include <stdint.h>

/* The arguments of step_ordinary. `outs`, `ends` and `arrays` may be None. */
typedef struct {
    PyObject *bound, *actions, *outs, *observations, *rewards, *ends, *arrays;
    int64_t *words;
    Py_ssize_t n_words, watch, t;
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

/* ---- what is kept ------------------------------------------------------------------------------ */

/* Whether nobody else can change the memory of `array`, which only we refer to. A view has that of its base. */
static int is_fresh(PyArrayObject *array) {
    PyObject *base = PyArray_BASE(array);
    if (base == NULL) {
        return PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA);
    }
    return PyArray_CheckExact(base) && Py_REFCNT(base) == 1 && PyArray_BASE((PyArrayObject *)base) == NULL &&
           PyArray_CHKFLAGS((PyArrayObject *)base, NPY_ARRAY_OWNDATA);
}

/* Whether `value` is a number, a text, bytes or None, which cannot be changed. */
static int is_constant(PyObject *value) {
    return value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value) ||
           PyArray_IsScalar(value, Generic) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value);
}

static PyObject *kept(PyObject *value, int is_ours);

/* `kept` of each value of a dict: the same dict if it is ours and has nothing to copy, else a new one. NULL without an
   exception also for keys that are no texts or numbers, whose hash may run the user's code. */
static PyObject *kept_values(PyObject *dict, int is_ours) {
    PyObject *copy = is_ours ? Py_NewRef(dict) : PyDict_Copy(dict), *key, *value;
    Py_ssize_t position = 0;
    while (copy != NULL && PyDict_Next(dict, &position, &key, &value)) {
        PyObject *part = PyUnicode_CheckExact(key) || PyLong_CheckExact(key) ? kept(value, is_ours) : NULL;
        if (part != NULL && part != value && copy == dict) {
            Py_SETREF(copy, PyDict_Copy(dict));
        }
        int is_set = part != NULL && copy != NULL && (part == value || PyDict_SetItem(copy, key, part) == 0);
        Py_XDECREF(part);
        if (!is_set) {
            Py_CLEAR(copy);
        }
    }
    return copy;
}

/* `kept` of each item of a tuple, in a new tuple. */
static PyObject *kept_items(PyObject *tuple, int is_ours) {
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    PyObject *copy = PyTuple_New(n);
    for (Py_ssize_t i = 0; copy != NULL && i < n; i++) {
        PyObject *part = kept(PyTuple_GET_ITEM(tuple, i), is_ours);
        if (part == NULL) {
            Py_CLEAR(copy);
        } else {
            PyTuple_SET_ITEM(copy, i, part);
        }
    }
    return copy;
}

/* A new reference to `value`, or to a copy of it if anybody else could change it: an environment may use the same array
   for its next observation, and two environments may share one. `is_ours`: only we refer to what holds `value`. So an
   array that only `value` refers to needs no copy. NULL without an exception for what is no constant, array, dict or
   tuple. */
static PyObject *kept(PyObject *value, int is_ours) {
#ifdef Py_GIL_DISABLED
    is_ours = 0; /* another thread may have references that are not counted here */
#endif
    if (is_constant(value)) {
        return Py_NewRef(value);
    }
    is_ours = is_ours && Py_REFCNT(value) == 1;
    if (PyArray_CheckExact(value)) {
        PyArrayObject *array = (PyArrayObject *)value;
        if (PyDataType_REFCHK(PyArray_DESCR(array))) {
            return NULL; /* objects, of which each needs a copy */
        }
        return is_ours && is_fresh(array) ? Py_NewRef(value) : PyArray_NewCopy(array, NPY_CORDER);
    }
    if (!(PyDict_CheckExact(value) || PyTuple_CheckExact(value)) || Py_EnterRecursiveCall(" while a value is copied")) {
        return NULL;
    }
    PyObject *copy = PyDict_CheckExact(value) ? kept_values(value, is_ours) : kept_items(value, is_ours);
    Py_LeaveRecursiveCall();
    return copy;
}

/* ---- a step ------------------------------------------------------------------------------------ */

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
    if (!is_constant(reward) ||
        (row->watch == WATCH_UNUSUAL && (PyDict_GET_SIZE(info) != 0 || !PyFloat_CheckExact(reward)))) {
        return 0;
    }
    int is_end = terminated != Py_False || truncated != Py_False;
    if (is_end && (row->ends == Py_None || !PyFloat_CheckExact(reward))) {
        return 0;
    }
    int is_written = row->arrays != Py_None; /* at once, so that nobody can change the observation before */
    if (is_written && at) {
        int is_filled = fill(row->arrays, (Target){ENTRY, row->t, step->column}, &observation, 1);
        if (is_filled <= 0) {
            return is_filled;
        }
    }
    observation = at && (is_end || !is_written) ? kept(observation, Py_REFCNT(result) == 1) : Py_NewRef(observation);
    if (observation == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int is_stored = 1;
    if (is_end) {
        PyObject *end = Py_BuildValue("nOOOO", step->column, observation, reward, terminated, truncated);
        is_stored = end != NULL && PyList_Append(row->ends, end) == 0;
        Py_XDECREF(end);
    }
    if (is_stored && !is_written) {
        is_stored = PyList_SetItem(row->observations, step->column, Py_NewRef(observation)) == 0;
    }
    is_stored = is_stored && PyList_SetItem(row->rewards, step->column, Py_NewRef(reward)) == 0;
    Py_DECREF(observation);
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
    if (!check_arguments(n, 11)) {
        return NULL;
    }
    Row row = {.bound = arguments[1], .actions = arguments[2], .outs = arguments[3], .observations = arguments[6],
               .rewards = arguments[7], .ends = arguments[8], .arrays = arguments[9]};
    if (!read_index(arguments[4], &first) || !read_index(arguments[5], &row.watch) || !read_index(arguments[10], &row.t)) {
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

/* Whether each value of `dict` is a constant. */
static int are_constant(PyObject *dict) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (!is_constant(value)) {
            return 0;
        }
    }
    return 1;
}

/* Store the `result` of a game's step, if it is ordinary. Returns as `store` does. */
static int store_game(PyObject *result, PyObject *living, PyObject *listed, PyObject *const *lists, Py_ssize_t first) {
    int is_ordinary = PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 5 && PyList_CheckExact(listed);
    for (Py_ssize_t i = 0; is_ordinary && i < 5; i++) {
        is_ordinary = PyDict_Check(PyTuple_GET_ITEM(result, i)); /* also a defaultdict */
    }
    if (!is_ordinary) {
        return 0;
    }
    PyObject *seen = PyTuple_GET_ITEM(result, 0), *gained = PyTuple_GET_ITEM(result, 1);
    Py_ssize_t n_agents = PyList_GET_SIZE(living);
    if (!has_agents(listed, living) || !has_agents(seen, living) || !has_agents(gained, living) ||
        !are_false(PyTuple_GET_ITEM(result, 2), n_agents) || !are_false(PyTuple_GET_ITEM(result, 3), n_agents) ||
        !are_constant(gained)) {
        return 0;
    }
    if (first < 0 || first + n_agents > PyList_GET_SIZE(lists[0]) || first + n_agents > PyList_GET_SIZE(lists[1])) {
        PyErr_Format(PyExc_IndexError, "there are no columns for %zd agents from %zd on", n_agents, first);
        return -1;
    }
    PyObject *observations = kept_values(seen, Py_REFCNT(result) == 1 && Py_REFCNT(seen) == 1);
    if (observations == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    put_values(lists[0], first, observations);
    put_values(lists[1], first, gained);
    Py_DECREF(observations);
    return 1;
}

static PyObject *step_game(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first;
    if (!check_arguments(n, 7)) {
        return NULL;
    }
    PyObject *living = arguments[2];
    if (!PyList_CheckExact(living) || !PyList_CheckExact(arguments[4]) || !PyList_CheckExact(arguments[5])) {
        return PyErr_Format(PyExc_TypeError, "living, observations and rewards must be lists");
    }
    if (!read_index(arguments[6], &first)) {
        return NULL;
    }
    PyObject *result = PyObject_CallOneArg(arguments[0], arguments[1]);
    PyObject *listed = result == NULL ? NULL : PyObject_GetAttrString(arguments[3], "agents");
    int is_stored = listed == NULL ? -1 : store_game(result, living, listed, arguments + 4, first);
    Py_XDECREF(listed);
    if (is_stored < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    return Py_BuildValue("NN", PyBool_FromLong(is_stored), result);
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {FUNCTION(step_ordinary), FUNCTION(step_game), {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_stepping", .m_size = -1, .m_methods = functions,
};

/* One phase, for the reason that buffers/_native.c gives. */
PyMODINIT_FUNC PyInit__stepping(void) {
    import_array();
    return PyModule_Create(&definition);
}
