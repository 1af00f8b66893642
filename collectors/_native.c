/* The loop over environments and the sums over episodes; see native.py.

   Between two calls of the environments' own Python, which drive everything else from the processor's caches, as little
   as possible is to be fetched again. What is not ordinary is left to Python, and to those who can say what is wrong. */

#include "../buffers/_native.h"

/* ---- environments ------------------------------------------------------------------------------ */

static PyObject *monotonic_ns, *reset_name, *seed_names; /* time.monotonic_ns, "reset", ("seed",) */

/* The words of a progress row, from its memoryview; to be released. 0 with an exception set if there are none. */
static int get_words(PyObject *object, Py_buffer *buffer) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_CONTIG | PyBUF_FORMAT) < 0) {
        return 0;
    }
    if (buffer->itemsize == sizeof(npy_int64) && buffer->len > RESETTING * buffer->itemsize &&
        (buffer->format[0] == 'l' || buffer->format[0] == 'q')) {
        return 1;
    }
    PyErr_SetString(PyExc_TypeError, "words must be those of a progress row, int64");
    PyBuffer_Release(buffer);
    return 0;
}

/* Whether `result` of `env.step` is what most steps return: no episode's end, nothing to be looked at. */
static int is_ordinary(PyObject *result) {
    return PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) == 5 && PyTuple_GET_ITEM(result, 2) == Py_False &&
           PyTuple_GET_ITEM(result, 3) == Py_False && PyDict_CheckExact(PyTuple_GET_ITEM(result, 4));
}

/* `env.step(action)` of `entry`, (column, env_rank, env.step); the column goes to `column`, env_rank to `words`. */
static PyObject *step_one(PyObject *entry, PyObject *action, npy_int64 *words, Py_ssize_t *column) {
    Py_ssize_t env_rank;
    if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 3) {
        PyErr_SetString(PyExc_TypeError, "bound must be a list of (column, env_rank, env.step)");
        return NULL;
    }
    if (!has_index(PyTuple_GET_ITEM(entry, 0), column) || !has_index(PyTuple_GET_ITEM(entry, 1), &env_rank)) {
        return NULL;
    }
    words[ENV_RANK] = env_rank;
    PyObject *arguments[] = {NULL, action};
    return PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 2), arguments + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
}

/* Put what an ordinary step returned into the lists; 0 with an exception set if they have no such column. */
static int store(PyObject *result, Py_ssize_t column, PyObject *observations, PyObject *rewards) {
    PyObject *observation = PyTuple_GET_ITEM(result, 0), *reward = PyTuple_GET_ITEM(result, 1);
    Py_INCREF(observation);
    Py_INCREF(reward);
    /* Either takes its reference, whether it succeeds or not. */
    int is_stored = PyList_SetItem(observations, column, observation) == 0;
    return PyList_SetItem(rewards, column, reward) == 0 && is_stored;
}

static PyObject *step_all(PyObject *bound, PyObject *actions, Py_ssize_t first, int is_watched, npy_int64 *words,
                          PyObject *observations, PyObject *rewards) {
    Py_ssize_t n = PyList_GET_SIZE(bound), column = 0;
    for (Py_ssize_t i = first; i < n; i++) {
        if (i >= PyList_GET_SIZE(bound) || i >= PyList_GET_SIZE(actions)) {
            PyErr_SetString(PyExc_IndexError, "bound or actions have become shorter meanwhile");
            return NULL;
        }
        PyObject *entry = PyList_GET_ITEM(bound, i), *action = PyList_GET_ITEM(actions, i);
        Py_INCREF(entry); /* the lists may let go of them meanwhile */
        Py_INCREF(action);
        PyObject *result = step_one(entry, action, words, &column);
        Py_DECREF(action);
        Py_DECREF(entry);
        if (result == NULL) {
            return NULL;
        }
        if (is_watched || !is_ordinary(result)) {
            return Py_BuildValue("nN", i, result);
        }
        int is_stored = store(result, column, observations, rewards);
        Py_DECREF(result);
        /* Signals: where `step` is no function of Python's, nobody else looks. */
        if (!is_stored || PyErr_CheckSignals() < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *step_ordinary(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t first;
    if (!has_arguments(n, 7) || !has_index(arguments[3], &first)) {
        return NULL;
    }
    PyObject *bound = arguments[1], *actions = arguments[2], *observations = arguments[5], *rewards = arguments[6];
    if (!PyList_Check(bound) || !PyList_Check(actions) || !PyList_Check(observations) || !PyList_Check(rewards)) {
        PyErr_SetString(PyExc_TypeError, "bound, actions, observations and rewards must be lists");
        return NULL;
    }
    if (PyList_GET_SIZE(actions) != PyList_GET_SIZE(bound)) {
        return PyErr_Format(PyExc_ValueError, "%zd actions are wanted, got %zd", PyList_GET_SIZE(bound),
                            PyList_GET_SIZE(actions));
    }
    if (first < 0) {
        return PyErr_Format(PyExc_IndexError, "there is no environment %zd", first);
    }
    int is_watched = PyObject_IsTrue(arguments[4]);
    Py_buffer words;
    if (is_watched < 0 || !get_words(arguments[0], &words)) {
        return NULL;
    }
    PyObject *result = step_all(bound, actions, first, is_watched, words.buf, observations, rewards);
    PyBuffer_Release(&words);
    return result;
}

/* time.monotonic_ns(), or -1 with an exception set. */
static long long now(void) {
    PyObject *number = PyObject_CallNoArgs(monotonic_ns);
    if (number == NULL) {
        return -1;
    }
    long long ns = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return ns;
}

static PyObject *reset_timed(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    Py_ssize_t phase, env_rank;
    if (!has_arguments(n, 5) || !has_index(arguments[1], &phase) || !has_index(arguments[2], &env_rank)) {
        return NULL;
    }
    Py_buffer buffer;
    if (!get_words(arguments[0], &buffer)) {
        return NULL;
    }
    npy_int64 *words = buffer.buf;
    PyObject *env_and_seed[] = {NULL, arguments[3], arguments[4]}, *result = NULL;
    long long began = now();
    if (began >= 0) {
        words[PHASE] = phase, words[ENV_RANK] = env_rank, words[HEARTBEAT] = began;
        result = PyObject_VectorcallMethod(reset_name, env_and_seed + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, seed_names);
    }
    if (result != NULL) {
        long long ended = now();
        if (ended >= 0) {
            words[RESETTING] += ended - began;
        } else {
            Py_CLEAR(result);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* ---- trajectories ------------------------------------------------------------------------------ */

enum { LENGTH, RETURN, NONZERO_REWARDS, DISCOUNTED_RETURN, WEIGHT, N_SUMS }; /* the rows of `running` */

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

/* The same, to be written into, and in one piece. */
static PyArrayObject *as_room(PyObject *object, int type, int n) {
    PyArrayObject *array = as_array(object, type, n);
    return array != NULL && PyArray_ISCARRAY(array) ? array : NULL;
}

static PyObject *sum_episodes(PyObject *Py_UNUSED(module), Arguments arguments, Py_ssize_t n) {
    if (!has_arguments(n, 7)) {
        return NULL;
    }
    PyArrayObject *reward = as_array(arguments[0], NPY_FLOAT32, 2), *done = as_array(arguments[1], NPY_BOOL, 2);
    PyArrayObject *running = as_room(arguments[2], NPY_FLOAT64, 2), *records = as_room(arguments[3], NPY_UINT8, 1);
    Py_ssize_t first_t, first_env_rank;
    if (!has_index(arguments[4], &first_t) || !has_index(arguments[5], &first_env_rank)) {
        return NULL;
    }
    double discount = PyFloat_AsDouble(arguments[6]);
    if (discount == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (reward == NULL || done == NULL || running == NULL || records == NULL) {
        return PyLong_FromLong(-1);
    }
    npy_intp n_rows = PyArray_DIM(reward, 0), n_columns = PyArray_DIM(reward, 1);
    Record *record = (Record *)PyArray_DATA(records);
    int fits = PyArray_DIM(done, 0) == n_rows && PyArray_DIM(done, 1) == n_columns &&
               PyArray_DIM(running, 0) == N_SUMS && PyArray_DIM(running, 1) == n_columns &&
               PyArray_NBYTES(records) >= PyArray_SIZE(reward) * (npy_intp)sizeof(Record) &&
               (npy_uintp)record % sizeof(double) == 0;
    if (!fits) {
        return PyLong_FromLong(-1);
    }
    double *sums = PyArray_DATA(running);
    for (npy_intp b = 0; b < n_columns; b++) {
        double length = sums[LENGTH * n_columns + b], return_ = sums[RETURN * n_columns + b];
        double nonzero = sums[NONZERO_REWARDS * n_columns + b], discounted = sums[DISCOUNTED_RETURN * n_columns + b];
        double weight = sums[WEIGHT * n_columns + b];
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
        sums[WEIGHT * n_columns + b] = weight;
    }
    return PyLong_FromSsize_t(record - (Record *)PyArray_DATA(records));
}

/* ---- the module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    FUNCTION(step_ordinary), FUNCTION(reset_timed), FUNCTION(sum_episodes), {NULL, NULL, 0, NULL},
};

static int start(PyObject *Py_UNUSED(module)) {
    import_array1(-1);
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL) {
        return -1;
    }
    Py_XSETREF(monotonic_ns, PyObject_GetAttrString(time, "monotonic_ns"));
    Py_DECREF(time);
    Py_XSETREF(reset_name, PyUnicode_InternFromString("reset"));
    Py_XSETREF(seed_names, Py_BuildValue("(s)", "seed"));
    return monotonic_ns != NULL && reset_name != NULL && seed_names != NULL ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = functions, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
