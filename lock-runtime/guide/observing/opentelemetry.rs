use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
use tracing_subscriber::{Layer as _, filter::Targets, prelude::*};

# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
// For example. In production it is an exporter of the crate `opentelemetry-otlp`, and the
// provider is built `with_batch_exporter`.
let exporter = InMemorySpanExporter::default();
let provider = SdkTracerProvider::builder()
    .with_simple_exporter(exporter.clone())
    .build();
let levels: Targets = "info,lock_runtime=debug".parse()?;
let spans = tracing_opentelemetry::layer().with_tracer(provider.tracer("orders"));
tracing_subscriber::registry()
    .with(spans.with_filter(levels))
    .init();
# let locks = lock_runtime::LockClient::in_memory();
# locks.exclusive("order:42").name("checkout").acquire().await?.release().await?;
# let spans = exporter.get_finished_spans()?;
# let names: Vec<_> = spans.iter().map(|span| &*span.name).collect();
# for name in ["lock.acquire", "lock.hold", "lock.release"] {
#     assert!(names.contains(&name), "{names:?}");
# }
# let has_key = |span: &opentelemetry_sdk::trace::SpanData| {
#     let mut fields = span.attributes.iter();
#     fields.any(|field| field.key.as_str() == "lock.key" && field.value.as_str() == "order:42")
# };
# assert!(spans.iter().all(has_key), "{spans:?}");
# Ok(()) }
