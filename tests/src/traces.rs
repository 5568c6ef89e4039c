//! The `tracing` events of one test, to be asserted on or waited for.
//!
//! ```
//! use lock_tests::Captured;
//!
//! let traces = Captured::new();
//! tracing::dispatcher::with_default(&traces.dispatch(), || {
//!     tracing::info!(key = "stock", "acquired")
//! });
//!
//! let events = traces.events();
//! assert_eq!(events[0].message, "acquired");
//! assert_eq!(events[0].field("key"), Some("stock"));
//! ```

use std::{collections::BTreeMap, fmt, sync::LazyLock};

use tokio::sync::watch;
use tracing::{
    Dispatch, Level, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::DefaultGuard,
};
use tracing_subscriber::{
    Layer, Registry,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The module that emitted it, unless set otherwise.
    pub target: String,
    /// Its level.
    pub level: Level,
    /// Its text.
    pub message: String,
    /// Its other fields, as printed.
    pub fields: BTreeMap<String, String>,
    /// The names of the spans around it, outermost first.
    pub spans: Vec<String>,
    /// The fields of all these spans at that time, as printed; of equal names, the value in the
    /// innermost span.
    pub span_fields: BTreeMap<String, String>,
}

impl Event {
    /// A field by its name, as printed.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }
}

/// Collects the events of all levels that are emitted while it is the subscriber; clones share the
/// collection.
#[derive(Clone, Debug)]
pub struct Captured {
    events: watch::Sender<Vec<Event>>,
    dispatch: Dispatch,
}

/// Prevents [`Captured`] from being the only subscriber of the process: `tracing` would then ask
/// only the subscriber of the current thread whether an event can ever be of interest, and a test
/// without one that comes first would disable the event for all.
static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(Registry::default()));

impl Captured {
    /// Collects nothing yet: see [`set_default`](Self::set_default) and
    /// [`dispatch`](Self::dispatch).
    pub fn new() -> Self {
        LazyLock::force(&ANOTHER);
        let events = watch::Sender::default();
        let dispatch = Dispatch::new(Registry::default().with(Collect(events.clone())));
        Self { events, dispatch }
    }

    /// Collects the events of this thread until the returned guard is dropped. In a test on a
    /// current-thread runtime (`#[tokio::test]`) these are the events of every task; tasks on other
    /// threads are collected by `WithSubscriber` only.
    #[must_use = "dropping the guard ends the collecting"]
    pub fn set_default(&self) -> DefaultGuard {
        tracing::dispatcher::set_default(&self.dispatch)
    }

    /// The dispatch for `tracing::instrument::WithSubscriber`, on any thread:
    /// `future.with_subscriber(traces.dispatch())`. Tasks that the future spawns are not included.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch.clone()
    }

    /// All events so far.
    pub fn events(&self) -> Vec<Event> {
        self.events.borrow().clone()
    }

    /// All events so far under a target or the modules below it.
    pub fn events_of(&self, target: &str) -> Vec<Event> {
        let below = format!("{target}::");
        let mut events = self.events();
        events.retain(|event| event.target == target || event.target.starts_with(&below));
        events
    }

    /// Waits until an event is `wanted`, and returns the first such event, also one from before.
    pub async fn wait_for(&self, wanted: impl Fn(&Event) -> bool) -> Event {
        let mut events = self.events.subscribe();
        loop {
            if let Some(event) = events
                .borrow_and_update()
                .iter()
                .find(|event| wanted(event))
            {
                return event.clone();
            }
            // The channel cannot close: `self` has the sender.
            let _ = events.changed().await;
        }
    }
}

impl Default for Captured {
    fn default() -> Self {
        Self::new()
    }
}

struct Collect(watch::Sender<Vec<Event>>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collect {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut spans = Vec::new();
        let mut span_fields = BTreeMap::new();
        for span in context
            .event_scope(event)
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            spans.push(span.name().to_owned());
            span_fields.extend(
                span.extensions()
                    .get::<Fields>()
                    .map(|fields| fields.0.clone())
                    .unwrap_or_default(),
            );
        }
        let metadata = event.metadata();
        let event = Event {
            target: metadata.target().to_owned(),
            level: *metadata.level(),
            message: fields.0.remove("message").unwrap_or_default(),
            fields: fields.0,
            spans,
            span_fields,
        };
        self.0.send_modify(|events| events.push(event));
    }
}

#[derive(Default)]
struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    /// Without the quotes that `Debug` puts around text.
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}
