//! Warnings on standard error: of the library about the settings, and about the server when it is
//! connected to, and of `run`. Failures are the errors of the command, and are not printed twice.

use std::{
    fmt::{self, Write as _},
    io::{self, Write as _},
};

use lock_runtime::text::visible;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt as _},
};

/// The modules that warn of what an operator can repair.
const MODULES: [&str; 4] = ["::from_env", "::handshake", "::link", "lockctl::run"];

struct Warnings {
    as_json: bool,
    /// The process that holds the lock of a command has the settings of the one that prints their
    /// warnings.
    is_keeper: bool,
}

/// Prints warnings from now on.
pub(crate) fn print(as_json: bool, is_keeper: bool) {
    let warnings = Warnings { as_json, is_keeper };
    let subscriber = Registry::default().with(warnings);
    // There is no other one in this program.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let (level, target) = (event.metadata().level(), event.metadata().target());
        let is_shown = *level <= Level::WARN && MODULES.iter().any(|it| target.ends_with(it));
        if !is_shown || self.is_keeper && target.ends_with("::from_env") {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        let text = visible(&format!("{}{}", line.message, line.fields));
        let _ = match self.as_json {
            true => writeln!(io::stderr(), "{}", serde_json::json!({ "warning": text })),
            false => writeln!(io::stderr(), "lockctl: warning: {text}"),
        };
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name}: {value:?})"),
        };
    }
}
