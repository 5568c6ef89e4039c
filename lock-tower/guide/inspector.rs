use axum::{
    Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use lock_tower::{inspector::Inspector, runtime::LockClient};

#[derive(Clone)]
struct Operator(&'static str);

async fn operators_only(mut request: Request, next: Next) -> Response {
    // In an application: its sessions, or the header of an authenticating proxy. Browsers send
    // these and passwords with event streams as well, but no bearer tokens.
    let login = request.headers().get(header::AUTHORIZATION);
    match login.map(|login| login.as_bytes()) {
        // alice:night-shift, in base64
        Some(b"Basic YWxpY2U6bmlnaHQtc2hpZnQ=") => {
            request.extensions_mut().insert(Operator("alice"));
            next.run(request).await
        }
        _ => {
            let ask = [(header::WWW_AUTHENTICATE, "Basic realm=\"locks\"")];
            (StatusCode::UNAUTHORIZED, ask).into_response()
        }
    }
}

# use {axum::body::Body, tower::ServiceExt as _};
# #[tokio::main(flavor = "current_thread")]
# async fn main() -> Result<(), Box<dyn std::error::Error>> {
let locks = LockClient::in_memory();
let inspector = Inspector::new(locks)
    .allow_revoke("https://ops.example.com")
    .caller(|request| Some(request.extensions.get::<Operator>()?.0.into()));
let operators: Router = Router::new()
    .nest_service("/locks", inspector)
    .layer(middleware::from_fn(operators_only));
# let get = || Request::get("/locks").header("host", "ops.example.com");
# let response = operators.clone().oneshot(get().body(Body::empty())?).await?;
# assert_eq!(response.status(), 401);
# let request = get().header("authorization", "Basic YWxpY2U6bmlnaHQtc2hpZnQ=");
# let request = request.body(Body::empty())?;
# assert_eq!(operators.oneshot(request).await?.status(), 200);
# Ok(()) }
