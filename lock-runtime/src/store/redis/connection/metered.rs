//! The metrics of calls to servers (feature `metrics`).

use std::time::Instant;

use metrics::{Key, Label, SharedString};
use redis::Value;

use super::{super::script::Call, Connection};
use crate::observe::{
    metrics::{CALL, CALLS, GROUP_SIZE, RECONNECTS},
    watch::meter::{count, observe, recorded},
};

/// A call to a server. If it is dropped before its end, its caller did not wait for the reply.
pub(super) struct Metered(Option<Started>);

struct Started {
    labels: [Label; 2],
    since: Instant,
}

const OUTCOMES: [&str; 3] = ["ok", "error", "dropped"];

fn labels(connection: &Connection, call: &Call) -> [Label; 2] {
    let server = connection.connector.server_label();
    let operation = SharedString::const_str(call.script.operation);
    [
        Label::new("server", server),
        Label::new("operation", operation),
    ]
}

impl Metered {
    pub(crate) fn begin(connection: &Connection, call: &Call) -> Self {
        let mut started = None;
        recorded(|_| {
            started = Some(Started {
                labels: labels(connection, call),
                since: Instant::now(),
            });
        });
        Self(started)
    }

    /// Counts the call. An error reply of the server is a value.
    pub(crate) fn ended<'v, E>(mut self, result: Result<impl IntoIterator<Item = &'v Value>, E>) {
        let is_error = |value: &Value| matches!(value, Value::ServerError(_));
        let is_ok = result.is_ok_and(|values| !values.into_iter().any(is_error));
        self.end(if is_ok { "ok" } else { "error" });
    }

    fn end(&mut self, outcome: &'static str) {
        let Some(Started { labels, since }) = self.0.take() else {
            return;
        };
        recorded(|to| {
            for known in OUTCOMES {
                let mut labels = labels.to_vec();
                labels.push(Label::new("outcome", known));
                let more = u64::from(known == outcome);
                count(to, &Key::from_parts(CALLS, labels), more);
            }
            let [server, _] = &labels;
            count(to, &Key::from_parts(RECONNECTS, vec![server.clone()]), 0);
            let key = Key::from_parts(CALL, labels.to_vec());
            observe(to, &key, since.elapsed().as_secs_f64());
        });
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.end("dropped");
    }
}

/// Records the number of requests that share a call.
pub(crate) fn grouped(connection: &Connection, call: &Call, size: usize) {
    recorded(|to| {
        let key = Key::from_parts(GROUP_SIZE, labels(connection, call).to_vec());
        observe(to, &key, size as f64);
    });
}

/// Counts a connection to the server, unless it is the first one.
pub(crate) fn connected(server: SharedString, is_first: bool) {
    recorded(|to| {
        let key = Key::from_parts(RECONNECTS, vec![Label::new("server", server)]);
        count(to, &key, u64::from(!is_first));
    });
}
