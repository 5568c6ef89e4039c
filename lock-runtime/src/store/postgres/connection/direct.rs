//! Whether a connection leads to the server itself. A pooler in between may give each transaction
//! another connection, on which other statements are prepared under the same names.

use std::{
    future::{Ready, ready},
    io,
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::future::join;
use pin_project::pin_project;
use tokio::io::{
    AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex,
};
use tokio_postgres::{
    Client,
    tls::{ChannelBinding, TlsConnect, TlsStream},
};

/// The code of a request to cancel, after its length; its process follows.
const CANCEL: [u8; 4] = 80_877_102_u32.to_be_bytes();

/// Returns whether the process that serves a connection is the one that was announced when it was
/// made. A pooler announces one of its own.
pub(crate) async fn is_direct(client: &Client, process: i32) -> bool {
    announced(client)
        .await
        .is_ok_and(|announced| announced == process)
}

/// Returns the process that was announced, from the request to cancel that the driver would send.
async fn announced(client: &Client) -> io::Result<i32> {
    let (near, mut far) = duplex(64);
    let token = client.cancel_token();
    let cancelling = token.cancel_query_raw(near, Plain);
    let reading = async move {
        let mut half = [0; 8];
        far.read_exact(&mut half).await?;
        if half[4..] != CANCEL {
            // It asks for TLS first.
            far.write_all(b"S").await?;
            far.read_exact(&mut half).await?;
        }
        let process = far.read_i32().await?;
        far.read_i32().await?;
        Ok(process)
    };
    join(cancelling, reading).await.1
}

/// No encryption, within this process.
struct Plain;

impl TlsConnect<DuplexStream> for Plain {
    type Stream = PlainStream;
    type Error = io::Error;
    type Future = Ready<io::Result<PlainStream>>;

    fn connect(self, stream: DuplexStream) -> Self::Future {
        ready(Ok(PlainStream(stream)))
    }
}

#[pin_project]
struct PlainStream(#[pin] DuplexStream);

impl TlsStream for PlainStream {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for PlainStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.project().0.poll_read(cx, buf)
    }
}

impl AsyncWrite for PlainStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.project().0.poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().0.poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.project().0.poll_shutdown(cx)
    }
}
