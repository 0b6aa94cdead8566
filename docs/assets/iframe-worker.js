// Browsers refuse workers to pages opened from disk. There, and only there, a worker is a script in a hidden frame:
// it posts to the page, the page posts to it, and search works without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...scripts) => scripts.reduce(
        (done, script) => done.then(() => loaded(inside.document, script)), Promise.resolve());
      this.ready = loaded(inside.document, url);
      this.addEventListener("message", (event) => this.onmessage && this.onmessage(event));
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
  const loaded = (page, url) => new Promise((resolve, reject) => {
    const script = page.createElement("script");
    script.src = new URL(url, location.href).href;
    script.onload = resolve;
    script.onerror = reject;
    page.body.appendChild(script);
  });
}
